"""The house rules, checked: linters, types, who may import whom."""

from __future__ import annotations

import ast
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NOT_QUICK

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = [ROOT / "agora", ROOT / "protocol", ROOT / "scripts"]

# `except Exception` stands only where a task, a job or a process ends, and where a library raises nothing narrower.
# What cleans up and raises again is not counted. A file is added only with the reason in the commit.
BROAD_EXCEPTS = {
    "agora/cli/console.py": 1,  # the command ends: a short message and the path of the traceback
    "agora/data/tokenizer.py": 1,  # the tokenizers extension raises plain Exception for every malformed file
    "agora/tuning/hf_stage.py": 1,  # transformers raises many kinds for a config that its classes cannot use
    "agora/net/rpc/connection.py": 1,  # a call's handler ends: its caller gets a typed refusal
    "agora/net/dht/status_client.py": 1,  # py-libp2p raises many kinds; each only means that this peer is no help
    "agora/core/tasks.py": 1,  # a piece of work beside the loop ends: whoever waits hears why
    "agora/train/compiled_layers.py": 1,  # torch.compile ends: the layers then run as they are
    "agora/train/device.py": 1,  # a job of the device thread ends: whoever waits hears why
}


CALLED_BY_OTHERS = {
    "connection_made",  # asyncio
    "add_protobuf_handler",  # hivemind
    "call_protobuf_handler",  # hivemind
    "loglikelihood",  # lm-evaluation-harness
    "open_timers",  # tests, of the simulator's clock, which has no other way to be looked into
}


def product_files() -> list[Path]:
    return sorted(path for package in PRODUCT for path in package.rglob("*.py"))


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in product_files():
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def tool(name: str) -> str:
    """The tool of the environment that runs the tests, found without relying on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else (shutil.which(name) or name)


def test_ruff_finds_nothing() -> None:
    done = run(tool("ruff"), "check", "agora", "protocol", "scripts", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(tool("ruff"), "format", "--check", "agora", "protocol", "scripts", "tests")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_mypy_strict_finds_nothing() -> None:
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_import_only_what_they_may() -> None:
    done = run(tool("lint-imports"))
    assert done.returncode == 0, done.stdout + done.stderr


# A user reads a sentence; a clause is quoted behind a peer's name or a command's. Classes that derive from these count.
SENTENCES = {"InputError", "ManifestError", "DataError", "ProtocolError", "LocalError"}
CLAUSES = {"Refused", "PeerFailed", "Failure"}
QUOTED = {"KeyTwice"}  # behind the file and the line


def classes_below(names: set[str]) -> set[str]:
    """These classes of the product and all that derive from them."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for _, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = set(names)
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def error_texts(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """The class, the line and the text of each error that is made of a text; {} stands for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for argument in node.args:
                match argument:
                    case ast.Constant(value=str(text)) if " " in text:
                        yield node.func.id, node.lineno, text
                    case ast.JoinedStr(values=parts):
                        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
                        yield node.func.id, node.lineno, text


def test_what_a_user_reads_is_a_sentence_and_what_a_peer_answers_a_clause() -> None:
    sentences, clauses = classes_below(SENTENCES) - QUOTED, classes_below(CLAUSES)
    wrong = []
    for path, tree in parsed():
        for name, line, text in error_texts(tree):
            # A name, a flag or a section in front stays as it is written; a command at the end has no full stop.
            if name in sentences and (re.match("(?!p2pd |gpu )[a-z]", text) or not text.endswith((".", "?", "}", "'"))):
                wrong.append(f"{path}:{line} is no sentence: {text}")
            if name in clauses and (re.match("(?!MLflow )[A-Z][a-z]+ ", text) or re.search(r"[^.]\.$", text)):
                wrong.append(f"{path}:{line} is no clause: {text}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path, tree in parsed() if tree.body and not ast.get_docstring(tree)]
    assert not silent


def test_broad_excepts_stand_only_where_they_are_known() -> None:
    def is_broad(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler):
            return False
        raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        bare = node.type is None
        return bare or (getattr(node.type, "id", "") in ("Exception", "BaseException") and not raises_again)

    found = {str(path): sum(is_broad(node) for node in ast.walk(tree)) for path, tree in parsed()}
    assert {path: count for path, count in found.items() if count} == BROAD_EXCEPTS


def test_nothing_unpickles_and_nothing_evaluates() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    found: list[str] = []
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [f"{path}: import {a.name}" for a in node.names if a.name.split(".")[0] in forbidden]
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in forbidden:
                found.append(f"{path}: from {node.module}")
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in {"torch.load", "torch.save", "eval", "exec", "numpy.load", "np.load"}:
                    found.append(f"{path}:{node.lineno} {name}")
    assert not found, "\n".join(found)


def test_what_the_quick_tier_leaves_out_exists() -> None:
    missing = [entry for entry in NOT_QUICK if not (ROOT / "tests" / entry.partition("::")[0]).exists()]
    named = {entry.partition("::")[2] for entry in NOT_QUICK} - {""}
    assert not missing and named <= set(globals())


def test_no_unfinished_marks() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if marks.search(line)
    ]
    assert not found, "\n".join(found)


def test_console_scripts_are_the_two_of_the_contract() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("[project.scripts]")[1].split("[", 1)[0]
    assert re.findall(r"^([\w-]+) =", block, re.M) == ["agora-node", "swarm"]


def replaced_private(node: ast.AST) -> bool:
    """Whether a statement sets a private attribute of another object than self, or monkeypatches one."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(
            isinstance(target, ast.Attribute)
            and re.match(r"_[a-z]", target.attr)
            and ast.unparse(target.value) not in ("self", "cls")
            for target in targets
        )
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and len(node.args) > 1):
        return False
    name = node.args[1]
    return isinstance(name, ast.Constant) and bool(re.match(r"_[a-z]", str(name.value)))


def test_no_test_replaces_a_private_attribute() -> None:
    """An object that needs another clock, network or process takes it as a parameter."""
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if replaced_private(node)
    ]
    assert not found, "\n".join(found)


def replaced_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of each name of the project that a test replaces by setattr: mypy reads no strings."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr")):
            continue
        match node.args:
            case [ast.Constant(value=str(name)), *_]:
                full = name
            case [ast.Name(id=owner), ast.Constant(value=str(name)), *_] if owner in imported:
                full = f"{imported[owner]}.{name}"
            case _:
                continue
        if full.partition(".")[0] in ("agora", "agora_protocol", "benchmarks"):
            yield node.lineno, full


def test_every_name_that_a_test_replaces_exists() -> None:
    seen, gone = 0, []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for line, name in replaced_names(ast.parse(path.read_text(encoding="utf-8"))):
            seen += 1
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                gone.append(f"{path.relative_to(ROOT)}:{line} {name}")
    assert seen > 100 and not gone, "\n".join(gone)


def test_claims_about_replicas_use_the_words_of_the_glossary() -> None:
    """Not those of the wire, which are older: an owner is a reducer, a slice a fragment, a lineage a history hash."""
    older = re.compile(r"(^|_)(owners?|owns|slices?|lineages?|anchors?|offences?)(_|$)")
    found = [
        f"{path.name}: {node.name}"
        for path in sorted((ROOT / "tests" / "replica").glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and older.search(node.name)
    ]
    assert not found, "\n".join(found)


def test_only_the_common_conftest_loads_a_hypothesis_profile() -> None:
    """One that a test file loads holds for all tests that are collected after it, which then try fewer examples."""
    loading = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "load_profile"
    ]
    assert loading == ["tests/conftest.py"]


def test_no_function_or_class_is_used_by_tests_alone() -> None:
    """By name: one that stands nowhere but in its own definition is dead. Commands and fields' checks are decorated."""
    used: set[str] = set()
    defined: list[tuple[str, str]] = []
    for path, tree in parsed():
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    used.add(name)
                case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                    used.add(name)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    if not node.decorator_list and not node.name.startswith("__") and path.parts[0] == "agora":
                        defined.append((node.name, f"{path}:{node.lineno} {node.name}"))
    dead = [place for name, place in defined if name not in used | CALLED_BY_OTHERS]
    assert not dead, "\n".join(dead)
