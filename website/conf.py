"""How Sphinx makes HTML of what `stage` wrote. Nothing is loaded from elsewhere, and pages open without a server."""

project = "Headwater"
language = "en"
root_doc = "index"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
highlight_language = "none"
smartquotes = False  # "auto" is to be typed so

myst_heading_anchors = 4  # as a repository's own view makes them

html_theme = "furo"
html_title = "Headwater"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_theme_options = {"top_of_page_buttons": [], "footer_icons": []}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
