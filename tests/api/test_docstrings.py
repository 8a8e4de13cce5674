"""The docstrings of the public names: numpydoc sections that match the signatures, and examples that run."""

import doctest
import importlib
import inspect
import re

import pytest
from public_calls import public_calls, with_methods
from scripts import listed_names
from services import service_of

import penstock as ps

# Numpydoc's sections, in its order.
SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "See Also", "Notes", "References", "Examples")
SECTION = re.compile(rf"^({'|'.join(SECTIONS)})\n-+\n", re.MULTILINE)
SERVICE = "grpc://127.0.0.1:8815"
# Of the libraries that examples import, those that a user may not have.
OPTIONAL = ("optax",)
# Module → the library that it needs, and that a user may not have. tests/contrib/torch has those of penstock.torch.
LIBRARIES = {"penstock.functional.keras_embedding": "keras", "penstock.functional.nnx_embedding": "flax"}
# A docstring of a message is generated with its code.
GENERATED = {"EngineConfig"}


def documented():
    """name → public function or class, each once; with those of modules that ``import penstock`` does not offer."""
    calls = {name: call for name, call in public_calls().items() if name not in GENERATED}
    for module, names in listed_names().items():
        if module not in (*LIBRARIES, "penstock", "penstock.torch"):
            calls |= with_methods(
                {f"{module}.{name}": getattr(importlib.import_module(module), name) for name in names}
            )
    first = {}
    for name, call in calls.items():
        if inspect.getdoc(call) and not (inspect.isfunction(call) and not call.__doc__):
            first.setdefault(getattr(call, "__func__", call), (name, call))
    return dict(first.values())


CALLS = documented()


def text_of(call):
    """The docstring; of a class that documents its parameters in the constructor, both."""
    texts = [inspect.getdoc(call)]
    if inspect.isclass(call) and inspect.isfunction(call.__init__):
        texts.append(inspect.cleandoc(call.__init__.__doc__ or ""))
    return "\n\n".join(texts)


def is_error(call):
    return inspect.isclass(call) and issubclass(call, BaseException)


def sections_of(call):
    """Title → body, of every section of a docstring."""
    _, *parts = SECTION.split(text_of(call))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def names_in(body):
    """The names that a section explains."""
    heads = [head.partition(" : ")[0] for head in re.findall(r"^\S.*", body, re.MULTILINE)]
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def parameters_of(call):
    """The names of its parameters, without ``self``; of errors that take a message, none."""
    if is_error(call) and "__init__" not in vars(call):
        return set()
    try:
        names = set(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return set()
    return {name for name in names if not name.startswith("_")} - {"self"}


def explained(call):
    """The parameters that its docstring explains, or that of a public base."""
    kinds = [kind for kind in call.__mro__ if kind.__doc__] if inspect.isclass(call) else [call]
    bodies = [sections_of(kind).get(title, "") for kind in kinds for title in ("Parameters", "Attributes")]
    return {name for body in bodies for name in names_in(body)}


def test_a_docstring_explains_every_parameter():
    missing = {name: parameters_of(call) - explained(call) for name, call in CALLS.items()}
    assert {name: names for name, names in missing.items() if names} == {}


def test_a_docstring_explains_no_parameter_that_is_missing():
    calls = {name: call for name, call in CALLS.items() if call is not ps.updates.Optimizer}  # the base of those with
    added = {
        name: names_in(sections_of(call).get("Parameters", "")) - parameters_of(call) for name, call in calls.items()
    }
    assert {name: names for name, names in added.items() if names} == {}


EXAMPLES = [name for name, call in CALLS.items() if ">>>" in text_of(call)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = text_of(CALLS[name])
    for library in re.findall(rf">>> import ({'|'.join(OPTIONAL)})\b", text):
        pytest.importorskip(library)
    if SERVICE not in text:
        run(name, text)
        return
    table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    with service_of(ps.Engine(ps.EmbeddingConfig.from_tables([table]))) as service:
        run(name, text.replace(SERVICE, service.address.uri))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # Keras, with jax 0.12
@pytest.mark.parametrize("module", LIBRARIES)
def test_the_examples_of_a_module_that_needs_a_library_run(module):
    pytest.importorskip(LIBRARIES[module])
    for name in listed_names()[module]:
        run(name, text_of(getattr(importlib.import_module(module), name)))


def run(name, text):
    examples = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    printed = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=printed.append)
    assert result.attempted, name
    assert not result.failed, "".join(printed)
