"""What others wrote is shown as text, whatever it does to a terminal."""

from headwater.core.plain import all_plain, plain


def test_a_text_is_one_line_and_steers_no_terminal():
    assert plain("a\x1b[2J\nb\u202ec – ö") == "a\\x1b[2J\\nb\\u202ec – ö"


def test_numbers_and_names_of_fields_stay():
    assert all_plain({"a": ["\x07", 1, None, {"b": ("\r",)}]}) == {"a": ["\\x07", 1, None, {"b": ["\\r"]}]}
