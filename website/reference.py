"""The Python reference: signatures and docstrings of the public names as Markdown, read from the sources.

Nothing is imported, so the site is built without PyTorch. A docstring is prose in Markdown; lines of the form
`name  what it is`, with their continuations indented, become a table.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
_ROW = re.compile(r"^(\S+(?: \S+)*?)\s{2,}(\S.*)$")
_LONG = 88  # columns: a longer signature has a line for each parameter
# Nobody calls these: they are what a function of ours hands out.
_HANDED_OUT = {"Job", "Loader", "NearModel", "PartitionJob", "Batch", "Attached"}
# Of these, users call few members; the others are for the parts of Headwater around them.
_MEMBERS = {
    "NearModel": set[str](),
    "Reducer": {"all_reduce", "counts", "close"},
    "Transforms": {"is_float", "is_random"},
    "EmbeddingBag": {"num_embeddings", "version", "requires_grad_", "prefetch", "ahead", "sync", "export",
                     "load_tensor", "save", "load", "resize", "drop", "close"},
}  # fmt: skip


def public_names() -> list[str]:
    """`headwater.__all__`."""
    return list(_literal("headwater", "__all__"))


def reference(name: str) -> str:
    """What stands on the page in place of `<!-- reference: name -->`."""
    if name == "reduce":
        homes = _literal("headwater.reduce", "_HOMES")
        return "\n".join(f"### {each}\n\n{_of(f'headwater.reduce.{homes[each]}', each)}"
                         for each in ("attach", "Attached", "Reducer"))  # fmt: skip
    if name == "transforms":
        parts = [f"### {each}\n\n{_of(module, each)}" for each, module in transforms()]
        return "\n".join(parts)
    if name == "HeadwaterError":
        return f"{markdown(_docstring(_tree('headwater.errors')))}\n"
    if name == "__version__":
        return ""
    if "." in name:
        module, _, name = name.rpartition(".")
        return _of(module, name)
    return _of(_literal("headwater", "_HOMES")[name], name)


def transforms() -> list[tuple[str, str]]:
    """(class, module) of every step, and of their chain."""
    found = []
    for node in _tree("headwater.data.transforms").body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headwater.data.transforms."):
            found += [(each.name, node.module) for each in node.names if each.asname]
    return sorted(found, key=lambda pair: pair[0])


def _of(module: str, name: str) -> str:
    node = next(each for each in _tree(module).body
                if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name)  # fmt: skip
    if isinstance(node, ast.FunctionDef):
        return f"```python\n{_settled(signature(node), module)}\n```\n\n{markdown(_docstring(node))}\n"
    parts = [f"```python\n{_settled(_made(node), module)}\n```\n"] if node.name not in _HANDED_OUT else []
    parts.append(markdown(_docstring(node)) + "\n")
    for each in node.body:
        made = isinstance(each, ast.FunctionDef) and each.name == "__init__" and node.name not in _HANDED_OUT
        if made and _docstring(each):
            parts.append(markdown(_docstring(each)) + "\n")
    parts += [f"{title}\n\n{text}\n" if text else f"{title}\n" for title, text in _members(node)]
    return "\n".join(parts)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    is_step = any(ast.unparse(base).endswith("Op") for base in node.bases)
    wanted = _MEMBERS.get(node.name, {"of"} if is_step else None)
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or each.name.startswith("_"):
            continue
        if wanted is not None and each.name not in wanted:
            continue
        kinds = {ast.unparse(decorator) for decorator in each.decorator_list}
        if any(kind.endswith(".setter") for kind in kinds):
            continue
        if kinds & {"property", "cached_property"}:
            shown = f"{each.name}: {ast.unparse(each.returns)}" if each.returns else each.name
        else:
            shown = re.sub(r"(,?)\s*\n\s*", lambda found: ", " if found[1] else "", signature(each, is_method=True))
            shown = shown.replace(", )", ")")
        yield f"**`{shown}`**", markdown(_docstring(each))


def signature(node: ast.FunctionDef, is_method: bool = False, name: str = "") -> str:
    """As one would call it, on a line for each parameter where it is long."""
    arguments = node.args
    first = 1 if is_method and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list) else 0
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_parameter(arg, default) for arg, default in list(zip(positional, defaults, strict=True))[first:]]
    if arguments.vararg:
        parts.append(f"*{_parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [_parameter(arg, default) for arg, default in named]
    if arguments.kwarg:
        parts.append(f"**{_parameter(arguments.kwarg, None)}")
    parts = [part for part in parts if not part.startswith("_")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name == "" else ""
    line = f"{name or node.name}({', '.join(parts)}){returns}"
    if len(line) <= _LONG:
        return line
    return f"{name or node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _made(node: ast.ClassDef) -> str:
    """How one is made: by `__init__`, or by a dataclass's fields."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return signature(each, is_method=True, name=node.name)
    fields = [each for each in node.body
              if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)]  # fmt: skip
    parts = [f"{ast.unparse(each.target)}: {ast.unparse(each.annotation)}"
             + (f" = {ast.unparse(each.value)}" if each.value else "") for each in fields]  # fmt: skip
    line = f"{node.name}({', '.join(parts)})"
    if len(line) <= _LONG:
        return line
    return f"{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    text = arg.arg + (f": {ast.unparse(arg.annotation)}" if arg.annotation else "")
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if arg.annotation else f"{text}={ast.unparse(default)}"


def _settled(text: str, module: str) -> str:
    """A signature with the values of constants in place of their names."""
    return re.sub(r"= ([A-Z][A-Z_]+)\b", lambda match: f"= {_constant(module, match[1])}", text)


def _constant(module: str, name: str) -> str:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    return ast.unparse(node.value)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for each, value in zip(target.elts, node.value.elts, strict=True):
                        if ast.unparse(each) == name:
                            return ast.unparse(value)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("headwater"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _constant(node.module, alias.name)
    return name


def markdown(text: str) -> str:
    """A docstring as the site shows it."""
    if not text:
        return ""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        if rows := _rows(lines):
            parts.append("| | |\n|---|---|\n" + "\n".join(f"| {_names(name)} | {_cell(what)} |" for name, what in rows))
        elif all(line.startswith("    ") for line in lines if line.strip()):
            parts.append("```python\n" + "\n".join(line[4:] for line in lines) + "\n```")
        elif any(mark in paragraph for mark in "├└│"):
            parts.append("```\n" + paragraph + "\n```")
        else:
            parts.append(_linked(paragraph))
    return "\n\n".join(part for part in parts if part.strip())


def _rows(lines: list[str]) -> list[tuple[str, str]]:
    """The rows of a table, if these lines are one."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if line.startswith(" "):
            if not rows:
                return []
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {line.strip()}"
        elif match := _ROW.match(line):
            rows.append((match[1], match[2]))
        else:
            return []
    return rows


def _names(text: str) -> str:
    return ", ".join(f"`{each}`" for each in text.split(", "))


def _cell(text: str) -> str:
    return _linked(text).replace("|", "\\|")


def _linked(text: str) -> str:
    """Pages that a docstring names are links; what looks like a tag is none."""
    text = re.sub(r"`?docs/([\w-]+\.md)`?", r"[\1](\1)", text)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if place % 2 else part.replace("<", "&lt;") for place, part in enumerate(parts))


def _docstring(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _literal(module: str, name: str):  # type: ignore[no-untyped-def]
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(each) == name for each in node.targets):
            return ast.literal_eval(node.value)
    raise KeyError(f"{module} has no {name}")


@lru_cache
def _tree(module: str) -> ast.Module:
    path = SOURCE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())
