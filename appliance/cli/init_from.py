"""`slipway init --from SOURCE`: write the manifest that corresponds to the command line or file of another server."""

import sys
from pathlib import Path

from appliance.cli.init import SCHEMA
from appliance.config import exits
from appliance.config.problems import Refused
from appliance.config.schema_file import schema_text
from appliance.config.settings import Given, load
from appliance.migration.convert import NAMES, Migration, migrate
from appliance.migration.read import read
from appliance.migration.values import REPOSITORY, SOURCE_PATH
from appliance.migration.words import Unreadable
from appliance.migration.write import manifest, report


def init_from(text: str, model: str | None, output: Path | None, *, service: str, force: bool) -> int:
    """Convert the command line or file `text` and write the manifest; `-` prints it. Return the exit code.

    model: replaces the model in the source. Nothing is downloaded, and the checkpoint need not exist.
    """
    printed = str(output) == "-"
    home = Path() if output is None or printed else output.parent
    try:
        made = migrate(read(text, service), home, model or "")
        target = output or Path(f"{_name(made)}.yaml")
        if not printed and target.exists() and not force:
            raise Unreadable(
                f"{target}: already exists. Overwrite it with --force, or choose another file with -o FILE"
            )
        written = manifest(made, None if printed else SCHEMA)
        load(Given(target, (), {}, text=written))
    except Unreadable as error:
        print(f"slipway init --from: {error}", file=sys.stderr)
        return exits.MANIFEST.number
    except Refused as refused:
        told = "\n".join(f"  {problem.key}: {problem.message}" for problem in refused.problems)
        print(f"slipway init --from: the manifest would be refused:\n{told}", file=sys.stderr)
        return refused.cause.number
    if printed:
        print(written, end="")
        print("\n".join(report(made)), file=sys.stderr)
        return exits.OK.number
    return _write(made, target, written)


def _write(made: Migration, target: Path, written: str) -> int:
    schema = target.parent / SCHEMA
    try:
        target.write_text(written)
        if not schema.exists():
            schema.write_text(schema_text())
    except OSError as error:
        print(f"{error.filename}: cannot write the file: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return exits.INTERNAL.number
    print(f"{target}: {len(made.values)} keys from {made.kind}")
    print("\n".join(report(made)))
    print(f"next: slipway check {target}; slipway plan {target}; slipway serve {target}")
    return exits.OK.number


def _name(made: Migration) -> str:
    """Return the name of the manifest's file: the last part of the model's name."""
    found = next((made.values[key].value for key in (REPOSITORY, SOURCE_PATH) if key in made.values), None)
    named = found or made.values[NAMES].value[0] if found or NAMES in made.values else "service"
    return Path(str(named)).name.removesuffix(".gguf") or "service"
