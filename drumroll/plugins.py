"""Load a backend, an engine, a transport or a reward by folder name or by `module:Name` / `file.py:Name`.

The only dynamic look-up in the package. A named plug-in lives in `drumroll/<kind>/<name>.py` (or a folder of that name) and says
which class it offers in `PLUGIN`; a name with a colon is imported from the user's module or file. A plug-in that needs more than the
package's own dependencies says so in `REQUIRES` (import name -> how to install it) and imports them only where it uses them; one that is
of use in tests only says `FOR_TESTS = True`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import sys
import traceback
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from drumroll.config import NamedSection, RunConfig, validate
from drumroll.config.explain import unknown_option
from drumroll.config.options import plugin_options
from drumroll.errors import UserError

# The two names that other code may rely on: what every backend is measured against, and the engine that needs no further install.
SPECIFICATION_BACKEND = "single"
EMBEDDED_ENGINE = "transformers"


def names(kind: str) -> list[str]:
    """Names of the plug-ins of `kind` ("backends", "engines", "sync") that the package ships, sorted."""
    package = importlib.import_module(f"drumroll.{kind}")
    found = (m.name for m in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if name not in package.SHARED)


def missing(kind: str, name: str) -> dict[str, str]:
    """What a plug-in of the package needs and this environment lacks: import name -> how to install it."""
    module = importlib.import_module(f"drumroll.{kind}.{name}")
    needs: dict[str, str] = vars(module).get("REQUIRES", {})
    return {package: how for package, how in needs.items() if importlib.util.find_spec(package) is None}


def for_tests(kind: str, name: str) -> bool:
    """Whether a plug-in of the package says in its file that it is of no use outside tests (`FOR_TESTS = True`)."""
    return bool(vars(importlib.import_module(f"drumroll.{kind}.{name}")).get("FOR_TESTS", False))


def install(extra: str) -> str:
    """The command that installs an extra: by the package's name where it is installed for good, else in the checkout that it runs from."""
    try:
        origin = metadata.distribution("drumroll").read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        return f"pip install -e '.[{extra}]'"
    editable = json.loads(origin).get("dir_info", {}).get("editable", False)
    return f"pip install -e '.[{extra}]'" if editable else f"pip install 'drumroll[{extra}]'"


def load(kind: str, name: str) -> Any:
    """The plug-in class (or function) called `name`. Raises UserError when there is none, naming the nearest."""
    check_name(kind, name)
    return load_symbol(name) if ":" in name else importlib.import_module(f"drumroll.{kind}.{name}").PLUGIN


def check_name(kind: str, name: str) -> None:
    """Raises UserError, naming the nearest, where the package has no plug-in of that name; a name with a colon is the user's own."""
    if ":" in name:
        return
    known = names(kind)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"unknown name {name!r} in drumroll.{kind}: expected one of {', '.join(known)}, or module:Name{hint}")


def options(kind: str, section: NamedSection, where: str = "config") -> BaseModel:
    """The typed options of the selected plug-in. Raises UserError for a name or a key that does not exist, with the nearest that does."""
    return _typed(kind, section, section.name, where)


def check(config: RunConfig, where: str = "config") -> None:
    """Check every plug-in section of a run, selected or not, against the schema in the plug-in's own file.

    Raises UserError naming the key (`backend.<name>.<option>`), and the nearest one that exists. `where` is the recipe in the message.
    """
    given = {"backends": config.backend} | ({"engines": config.engine} if config.engine is not None else {})
    sections = [(kind, section, name) for kind, section in given.items() for name in dict.fromkeys((section.name, *section.sections))]
    for kind, section, name in sections:
        _refuse_unknown(kind, section, name, where)
    for kind, section, name in sections:
        _typed(kind, section, name, where)


def _typed(kind: str, section: NamedSection, name: str, where: str) -> BaseModel:
    key = f"{kind.removesuffix('s')}.{name}"
    try:
        schema = load(kind, name).Config
    except UserError as error:
        raise UserError(f"{where}: {key}: {error}") from error
    except AttributeError as error:
        raise UserError(f"{where}: {key}: {error}; expected a plug-in, a class or object as in drumroll/{kind}/base.py") from error
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        raise UserError(f"{where}: {key}: its Config is {schema!r}, expected a subclass of pydantic's BaseModel")
    return validate(schema, section.sections.get(name, {}), where, key)


def _refuse_unknown(kind: str, section: NamedSection, name: str, where: str) -> None:
    """Names and keys that the package does not have, found before anything is imported: that takes seconds."""
    key = f"{kind.removesuffix('s')}.{name}"
    try:
        check_name(kind, name)
    except UserError as error:
        raise UserError(f"{where}: {key}: {error}") from error
    known = plugin_options().get(key)
    unknown = [str(option) for option in section.sections.get(name, {}) if known is not None and option not in known]
    if unknown:
        raise UserError("\n".join(f"{where}: {unknown_option(key, option)}" for option in unknown))


def load_symbol(path: str) -> Any:
    """Import `package.module:Name` or `some/file.py:Name`. Raises UserError naming what is missing."""
    where, _, symbol = path.rpartition(":")
    module = _import_file(where) if where.endswith(".py") else _import_module(where, path)
    if symbol not in vars(module):
        near = get_close_matches(symbol, list(vars(module)), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{path!r}: {where} defines no {symbol!r}{hint}")
    return vars(module)[symbol]


def _import_module(where: str, path: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and not where.startswith(error.name):  # the module exists, and something that it imports does not
            raise UserError(f"{path!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error
        raise UserError(f"{path!r}: no module {where!r}; expected module:Name on the Python path, or file.py:Name") from error
    except Exception as error:  # fault boundary: the user's module
        raise UserError(f"{path!r}: {where or 'a module without a name'} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(where: str) -> Any:
    file = Path(where).resolve()
    if not file.is_file():
        raise UserError(f"{where}: no such file; expected file.py:Name")
    name = f"drumroll_user_{file.stem}_{abs(hash(str(file)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that what it defines can be pickled by name and dataclasses resolve
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # fault boundary: the user's file
        del sys.modules[name]  # half of it
        raise UserError(f"{where}: cannot be imported: {_where(error, file)}{type(error).__name__}: {error}") from error
    return module


def _where(error: Exception, file: Path) -> str:
    """The last line of the user's own file on the way to the error; an error of syntax says its own."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"line {lines[-1]}: " if lines else ""
