"""The rules of this code base as functions from a source file to the places that break them.

Each `check_*` yields lines `file:line: value found; limit`. `test_repo_rules.py` applies them to the
repository, and each of them to a small bad source that it must catch. Nothing here imports `uneven`.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

# The lines of src/uneven together. Raising it takes a page in docs/decisions/ that says what they buy.
SRC_LINE_BUDGET = 17000
MAX_FILE_LINES = MappingProxyType({"src": 400, "tests": 600})
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_POSITIONAL = 2
NAMES_THAT_SAY_NOTHING = frozenset({"utils", "helpers", "common", "misc", "base"})
# Registered with transformers' attention interface, which fixes their parameters.
CALLED_BY_TRANSFORMERS = frozenset({"attend", "run_experts"})
ENVIRONMENT_FILE = "src/uneven/launch/environment.py"

# Lowest first. A layer imports what is lower, and of its own level only what SIDEWAYS names.
LAYERS = (
    ("errors", "layout", "modelspec", "config", "cluster", "goodput"),
    ("costmodel", "planner", "sim", "alloc", "draw"),
    ("comm", "reshard", "parallel", "sync", "optim", "checkpoint", "data", "profile"),
    ("elastic", "launch"),
    ("train", "serve"),
    ("agents", "rl"),
    ("cli",),
)
LEVEL = MappingProxyType({name: level for level, names in enumerate(LAYERS) for name in names})
DECISIONS, MECHANISMS = 1, 2
SIDEWAYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "layout": frozenset({"errors"}),
        **{name: frozenset({"errors", "layout"}) for name in ("modelspec", "config", "cluster", "goodput")},
        "planner": frozenset({"costmodel"}),
        "sim": frozenset({"costmodel", "planner"}),
        "alloc": frozenset({"costmodel", "planner"}),
        **{name: frozenset({"comm"}) for name in ("reshard", "parallel", "data", "profile")},
        **{name: frozenset({"comm", "reshard"}) for name in ("sync", "optim", "checkpoint")},
        "elastic": frozenset({"launch"}),
    }
)
# Loading these costs seconds and gigabytes; values and decisions do without.
HEAVY = ("torch", "transformers")

MUTABLE_TYPES = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "Counter", "deque", "OrderedDict"})
# What may be called while a module is imported: it makes constants and types, and has no effect.
CALLS_AT_IMPORT = frozenset(
    {
        *("dataclass", "field", "TypeVar", "ParamSpec", "TypeVarTuple", "NewType", "NamedTuple", "cast"),
        *("frozenset", "tuple", "range", "float", "int", "len", "MappingProxyType"),
        *("re.compile", "logging.getLogger", "getLogger", "Path", "pathlib.Path"),
        *("Field", "typer.Typer", "typer.Option", "typer.Argument", "Typer", "Option", "Argument"),
    }
)
TYPER_REGISTRATIONS = frozenset({"command", "callback", "add_typer"})

# Named things of the workplace of whoever wrote the code mean nothing to its reader.
FOREIGN_PLACES = re.compile(r"(?<![\w.])/work/|bash_jobs|\.\./shared")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file: its path relative to the repository, and what it says."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        return cls(path, text, ast.parse(text, path))

    @property
    def root(self) -> str:
        return self.path.split("/")[0]

    @property
    def layer(self) -> str:
        """The name under `uneven` that the file belongs to; "" for the package's own `__init__`."""
        name = Path(self.path).relative_to("src/uneven").parts[0].removesuffix(".py")
        return {"__init__": "", "__main__": "cli"}.get(name, name)

    @property
    def package(self) -> list[str]:
        """The parts of the package that relative imports start from."""
        return list(Path(self.path).relative_to("src").parent.parts)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a name or attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def last_name(node: ast.AST) -> str:
    """The last name of a chain or of a call of one: `command` for `app.command()`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else dotted(node)


def functions(tree: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[tuple[Function, bool]]:
    """All functions, nested ones too, each with whether its first parameter is `self` or `cls`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            is_static = any(dotted(each) == "staticmethod" for each in node.decorator_list)
            yield node, owner is not None and not is_static
        if isinstance(node, Function | ast.Lambda):
            yield from functions(node)
        else:
            yield from functions(node, node if isinstance(node, ast.ClassDef) else owner)


# Size and shape


def check_file_length(source: Source) -> Iterator[str]:
    lines, limit = len(source.text.splitlines()), MAX_FILE_LINES[source.root]
    if lines > limit:
        yield f"{source.path}:{limit + 1}: the file has {lines} lines; at most {limit} in {source.root}"


def check_function_length(source: Source) -> Iterator[str]:
    for node, _ in functions(source.tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"


def check_parameters(source: Source) -> Iterator[str]:
    for node, has_receiver in functions(source.tree):
        if is_command(source, node) or node.name in CALLED_BY_TRANSFORMERS:
            continue
        positional = [*node.args.posonlyargs, *node.args.args][has_receiver:]
        if positional and positional[0].arg == "ctx":
            positional = positional[1:]  # the `self` of an autograd.Function
        count = len(positional) + len(node.args.kwonlyargs)
        where = f"{source.path}:{node.lineno}: {node.name}"
        if count > MAX_PARAMETERS:
            yield f"{where} has {count} parameters; at most {MAX_PARAMETERS}: is a value type missing?"
        # In tests pytest fills the parameters by name, whatever their kind.
        if source.root == "src" and len(positional) > MAX_POSITIONAL and not is_called_by_others(node.name):
            found = f"takes {len(positional)} parameters by position"
            yield f"{where} {found}; at most {MAX_POSITIONAL}, others after *"


def is_command(source: Source, node: Function) -> bool:
    """Whether it is a typer command: each parameter is an option, their number is the user's interface."""
    names = {last_name(decorator) for decorator in node.decorator_list}
    return source.path.startswith("src/uneven/cli/") and bool(names & {"command", "callback"})


def is_called_by_others(name: str) -> bool:
    """Whether Python, torch or transformers calls it, and by position: special methods, forward, hooks."""
    is_special = name.startswith("__") and name not in ("__init__", "__new__", "__call__", "__post_init__")
    is_torch = name in ("forward", "backward", "setup_context") or name.endswith(("_forward", "hook"))
    return is_special or is_torch


def check_line_budget(lines_by_path: Mapping[str, int], budget: int = SRC_LINE_BUDGET) -> Iterator[str]:
    total = sum(lines_by_path.values())
    if total > budget:
        largest = max(lines_by_path, key=lambda path: lines_by_path[path])
        yield f"src has {total} lines; its budget is {budget}; {largest} is the largest file"


def check_path_names(path: str) -> Iterator[str]:
    for part in Path(path).parts:
        if part.split(".")[0] in NAMES_THAT_SAY_NOTHING:
            yield f"{path}:1: {part!r} names no concept; not one of {sorted(NAMES_THAT_SAY_NOTHING)}"


# State and style


def check_no_global(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}; pass it as an argument"


def check_no_bare_except(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{source.path}:{node.lineno}: a bare except; name the exceptions that are handled here"


def check_zip_is_strict(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        is_zip = isinstance(node, ast.Call) and dotted(node.func) == "zip"
        if is_zip and not any(keyword.arg == "strict" for keyword in node.keywords):
            yield f"{source.path}:{node.lineno}: zip without strict=; write strict=True"


def check_annotated(source: Source) -> Iterator[str]:
    for node, has_receiver in functions(source.tree):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args][has_receiver:] + arguments.kwonlyargs
        named += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
        missing = [each.arg for each in named if each.annotation is None]
        missing += ["return"] if node.returns is None else []
        if missing:
            yield f"{source.path}:{node.lineno}: {node.name} has no annotation for {', '.join(missing)}"


def check_environment_in_one_place(source: Source) -> Iterator[str]:
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
    if source.path == ENVIRONMENT_FILE:
        return
    for node in ast.walk(source.tree):
        found = {dotted(node)} & names
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found = {f"os.{alias.name}" for alias in node.names} & names
        for name in found:
            yield f"{source.path}:{node.lineno}: {name}; the environment is read in {ENVIRONMENT_FILE} only"


class ImportTime(ast.NodeVisitor):
    """Collects what runs when a module is imported, without the bodies of functions and classes.

    Decorators, defaults and class bodies are left to ruff (B006, B008, RUF012).
    """

    def __init__(self) -> None:
        self.calls: list[ast.Call] = []
        self.assignments: list[ast.Assign | ast.AnnAssign | ast.AugAssign] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, Function | ast.ClassDef | ast.Lambda) or is_main_guard(node):
            return
        if isinstance(node, ast.Call):
            self.calls.append(node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self.assignments.append(node)
        self.generic_visit(node)


def is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def import_time(source: Source) -> ImportTime:
    found = ImportTime()
    found.visit(source.tree)
    return found


def mutable_part(value: ast.AST | None) -> ast.AST | None:
    """The first list, dict or set that a value holds on to; tuples and read-only mappings are looked into."""
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return value
    inside: list[ast.AST] = []
    if isinstance(value, ast.Tuple):
        inside = list(value.elts)
    elif isinstance(value, ast.IfExp):
        inside = [value.body, value.orelse]
    elif isinstance(value, ast.Call):
        if last_name(value) in MUTABLE_TYPES:
            return value
        if last_name(value) == "MappingProxyType" and value.args and isinstance(value.args[0], ast.Dict):
            inside = [each for key, each in zip(value.args[0].keys, value.args[0].values, strict=True) if key]
    return next((part for part in map(mutable_part, inside) if part is not None), None)


def check_no_mutable_state(source: Source) -> Iterator[str]:
    for node in import_time(source).assignments:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = ", ".join(ast.unparse(target) for target in targets)
        part = None if names == "__all__" else mutable_part(node.value)
        if part is not None:
            kind = type(part).__name__ if not isinstance(part, ast.Call) else last_name(part)
            wanted = "a tuple, frozenset or MappingProxyType"
            yield f"{source.path}:{part.lineno}: {names} is module-level mutable state ({kind}); use {wanted}"


def value_types(source: Source) -> set[str]:
    """Classes whose construction has no effect: frozen ones of the file, and types from this package."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            is_frozen = any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
            if is_frozen or any(last_name(each) == "NamedTuple" for each in node.bases):
                found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("uneven.")):
            found |= {alias.asname or alias.name for alias in node.names if alias.name[:1].isupper()}
    return found


def check_nothing_done_at_import(source: Source) -> Iterator[str]:
    allowed = CALLS_AT_IMPORT | value_types(source)
    for node in import_time(source).calls:
        registers = source.path.startswith("src/uneven/cli/") and last_name(node) in TYPER_REGISTRATIONS
        applied = isinstance(node.func, ast.Call)  # app.command()(f): the inner call is judged by itself
        if not (registers or applied or dotted(node.func) in allowed):
            called = ast.unparse(node.func)
            yield f"{source.path}:{node.lineno}: {called}(...) runs at import; a module only defines"


# Layers


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported anywhere in the file, in functions and under guards too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = source.package[: len(source.package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and last_name(node) in ("import_module", "__import__"):
            names = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
            yield from ((node.lineno, str(name)) for name in names)


def check_layer_is_known(source: Source) -> Iterator[str]:
    if source.layer and source.layer not in LEVEL:
        where = "LAYERS in tests/unit/repo_rules.py"
        yield f"{source.path}:1: {source.layer!r} stands in no layer; add it to {where}"


def check_layers(source: Source) -> Iterator[str]:
    """The package's own `__init__` is exempt: it re-exports. That it stays light is tested by importing."""
    if source.layer not in LEVEL:
        return
    for line, module in imported_modules(source):
        if module.split(".")[0] != "uneven":
            continue
        target = module.split(".")[1] if "." in module else ""
        reason = why_not(source.layer, target)
        if reason:
            yield f"{source.path}:{line}: {source.layer} imports {module}; {reason}"


def why_not(layer: str, target: str) -> str:
    """Why `layer` may not import `target`; "" if it may."""
    if target.startswith("__") or target == layer:
        return ""
    if target not in LEVEL:
        return "name the layer's module, as in `from uneven.layout import Partition`"
    own, other = LEVEL[layer], LEVEL[target]
    if own == MECHANISMS and other == DECISIONS:
        return "mechanisms never import decisions: a plan is an argument"
    if other > own:
        return f"L{own} may not import L{other}"
    if other == own and target not in SIDEWAYS.get(layer, frozenset()):
        may = sorted(SIDEWAYS.get(layer, frozenset())) or "nothing"
        return f"inside L{own} {layer} may import {may}"
    return ""


def check_light_layers(source: Source) -> Iterator[str]:
    if LEVEL.get(source.layer, len(LAYERS)) > DECISIONS:
        return
    for line, module in imported_modules(source):
        if module.split(".")[0] in HEAVY:
            yield f"{source.path}:{line}: {source.layer} imports {module}; values and decisions do without"


def check_distributed_only_in_comm(source: Source) -> Iterator[str]:
    if source.layer == "comm":
        return
    reason = "only comm does: there stand timeouts, byte counts and faults"
    for line, module in imported_modules(source):
        if module.split(".")[:2] == ["torch", "distributed"]:
            yield f"{source.path}:{line}: {source.layer} imports {module}; {reason}"
    torch = {"torch"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            torch |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and dotted(node.value) in torch:
            yield f"{source.path}:{node.lineno}: {source.layer} uses torch.distributed; {reason}"


# Text


def check_no_foreign_places(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        found = FOREIGN_PLACES.search(line)
        if found:
            yield f"{path}:{number}: mentions {found.group()!r}, a place on one machine"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a Markdown text outside of code."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark.group(1).startswith(fence)):
            fence = "" if fence else mark.group(1)
        elif not fence:
            yield number, re.sub(r"`[^`]*`", "", line)


LINK = re.compile(r'\]\(\s*<?([^)\s>]+)|^\s*\[[^\]]+\]:\s*(\S+)|(?:src|href)="([^"]+)"')


def anchors(text: str) -> set[str]:
    """The names of a Markdown text's headings in links, as GitHub makes them."""
    heads = re.findall(r"^#+\s+(.*?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def check_links(path: Path, root: Path) -> Iterator[str]:
    """Relative links of a Markdown file that lead to no file or to no heading of it."""
    where = path.relative_to(root).as_posix()
    for number, line in prose(path.read_text()):
        for match in LINK.finditer(line):
            link = next(group for group in match.groups() if group)
            if re.match(r"[a-z][a-z+.-]*:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or not target.is_relative_to(root.resolve()):
                yield f"{where}:{number}: the link {link!r} leads to no file of the repository"
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                yield f"{where}:{number}: the link {link!r} leads to no heading of {target.name}"


CHECKS_OF_ALL: tuple[Callable[[Source], Iterator[str]], ...] = (
    check_file_length,
    check_function_length,
    check_parameters,
    check_no_global,
    check_no_bare_except,
    check_zip_is_strict,
)
# Not for tests: pytest's marks, hypothesis's strategies and tables of cases stand at module level there.
CHECKS_OF_SRC: tuple[Callable[[Source], Iterator[str]], ...] = (
    check_annotated,
    check_environment_in_one_place,
    check_no_mutable_state,
    check_nothing_done_at_import,
    check_layer_is_known,
    check_layers,
    check_light_layers,
    check_distributed_only_in_comm,
)
