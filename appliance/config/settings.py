"""Sources of settings and their precedence. This is the only module that reads the environment.

    --a.b value, --set a.b=value  >  SLIPWAY__A__B=value  >  overlays  >  the manifest  >  files that it extends
        >  hardware profile  >  defaults of the schema

Mappings are merged key by key; other values are replaced. Every value keeps its source location.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path as File

from pydantic import ValidationError

from appliance.config import variables
from appliance.config.composition import overlays, profiles
from appliance.config.composition.files import Reading, folder_of, joined, read_file, unreadable
from appliance.config.composition.fix import fix_at_definition
from appliance.config.composition.interpolate import Names, interpolate
from appliance.config.composition.profiles import Choose, Profile
from appliance.config.composition.variables import resolve
from appliance.config.deprecated import rename
from appliance.config.document import is_clear_text
from appliance.config.fix import Hint
from appliance.config.keys import Key, path_keys
from appliance.config.manifest import Manifest
from appliance.config.merge import at, merged, without
from appliance.config.overrides import Given as Given
from appliance.config.overrides import Option as Option
from appliance.config.overrides import read_environment, read_options
from appliance.config.overrides import variable as variable
from appliance.config.platform import Platform, platform
from appliance.config.platform_variables import unused_variables
from appliance.config.problems import Problem, Refused, from_fault, from_validation, unread
from appliance.config.versions import Older, in_older_words
from appliance.config.yaml_loader import Path, Place, Tree, dotted
from engine.api.files import is_path, real_path


@dataclass(frozen=True)
class Settings:
    """The effective manifest with the source location of each value. `auto` is not resolved yet."""

    manifest: Manifest
    tree: Tree
    path: File
    cache: File | None = None  # folder for data that can be deleted, by the XDG base directory specification
    platform: Platform = Platform()  # platform that will stop the service
    files: tuple[File, ...] = ()  # the manifest and all files that compose it
    layers: tuple[str, ...] = ()  # files, overlays and profile that contributed, as text
    older: Mapping[str, Older] = field(default_factory=dict)  # files of an older version, by name
    notices: tuple[Problem, ...] = ()  # warnings about deprecated names, one each
    downloaded: Mapping[Path, File] = field(default_factory=dict)  # folders of adapters with a URI, by their path's key

    def origin(self, key: Key | Path) -> str:
        """Return the origin of a value as text.

        Examples: `m.yaml:3:9`, `m.yaml:30:12 (profile h200x1)`, `SLIPWAY__ENDPOINTS__PORT`, `--set endpoints.port`,
        `default`.
        """
        path = key.path if isinstance(key, Key) else key
        place = self.tree.values.get(path)
        if place is None:
            return "default"
        spelled = self.tree.interpolated.get(path)
        through = [part for part in (place.layer, spelled.text if spelled else "") if part]
        return f"{place} ({', '.join(through)})" if through else str(place)

    def place(self, path: Path) -> Place:
        """Return the location of a value, or of the nearest section that contains it."""
        for length in range(len(path), 0, -1):
            if place := self.tree.values.get(path[:length]):
                return place if length == len(path) else self.tree.keys.get(path[:length], place)
        return self.tree.values.get((), Place(str(self.path), 1, 1))

    def folder(self, path: Path) -> File:
        """Return the folder that a relative path starts at.

        This is the folder of the file that contains the value, or the manifest's folder for an option or variable.
        """
        place = self.tree.values.get(path)
        return real_path(folder_of(place.source if place and place.line else str(self.path)))

    def file(self, path: Path) -> File:
        """Return the file or folder that a value names, or that was downloaded for it."""
        if path in self.downloaded:
            return self.downloaded[path]
        return joined(self.folder(path), str(at(self.tree, path)))

    def from_manifest(self, path: Path) -> str:
        """Return a path relative to the manifest's folder, independent of the file that contains it."""
        written = str(at(self.tree, path))
        return written if File(written).is_absolute() else os.path.relpath(self.file(path), real_path(self.path).parent)

    def paths(self) -> dict[Path, str]:
        """Return every value that names a file or folder, in the form of from_manifest."""
        named = _named_paths(self.manifest)
        return {path: self.from_manifest(path) for path in (*path_keys(), *named) if at(self.tree, path) is not None}


def _named_paths(manifest: Manifest) -> Iterator[Path]:
    """Yield the paths of values that name files below chosen names and in lists."""
    yield from (("secrets", name, "file") for name in manifest.secrets)
    yield from (("adapters", number, "path") for number, one in enumerate(manifest.adapters) if one.path is not None)
    yield from (("adapter_loading", "folders", number) for number in range(len(manifest.adapter_loading.folders)))


def cache_folder(environ: Mapping[str, str]) -> File | None:
    if cache := variables.value(environ, "XDG_CACHE_HOME"):
        return File(cache) / "slipway"
    home = variables.value(environ, "HOME")
    return File(home) / ".cache" / "slipway" if home else None


@dataclass(frozen=True)
class Layers:
    """Values of each source, highest precedence first. The schema supplies the defaults."""

    options: Tree
    environment: Tree
    overlays: Tree
    manifest: Tree  # with the files that it extends
    profile: Tree = field(default_factory=lambda: Tree(value={}))

    def merged(self) -> Tree:
        return merged(*(getattr(self, one.name) for one in reversed(fields(self))))


def load(given: Given, choose: Choose | None = None) -> Settings:
    """Read, merge and validate all sources. Raise Refused with all problems.

    `choose` selects a hardware profile for the machine; without it no profile is used.
    """
    reading = Reading(given.environ)
    with in_older_words(reading.older):
        return _load(given, choose, reading)


def _load(given: Given, choose: Choose | None, reading: Reading) -> Settings:
    file, named = overlays.split(_read_manifest(given, reading))
    asked = overlays.requested_overlays(given.overlays, variables.value(given.environ, "SLIPWAY_OVERLAY"))
    chosen = [overlays.read(one, named, reading) for one in asked]
    layers = Layers(
        options=read_options(given), environment=read_environment(given), overlays=merged(*chosen), manifest=file
    )
    notices = [*reading.notices, *rename(layers.environment), *rename(layers.options)]
    notices += unused_variables(given.environ)
    faults = [fault for layer in (file, *chosen) for fault in layer.faults]
    wrong = variables.wrong(given.environ)
    if any(fault.path[:1] in ((), ("extends",)) and fault.place.line for fault in faults):
        # Files that were not read completely: do not report missing keys.
        raise Refused(_once([*_of_faults(layers.merged()), *wrong]))
    whole = _Whole.of(layers.merged(), given.environ)
    taken, notes = _taken(whole, choose)
    tree = interpolate(merged(taken.values if taken else Tree(value={}), whole.tree), whole.names)
    manifest, problems = _validated(tree)
    problems += [
        *wrong,
        *_no_paths(manifest, tree, given.manifest),
        *whole.of_profiles(),
        *_of_overlays(layers, named, given.environ),
    ]
    if problems or manifest is None:
        raise Refused(_once(problems))
    return Settings(
        *(manifest, tree, given.manifest, cache_folder(given.environ), platform(given.environ)),
        files=tuple(reading.files),
        layers=(*_notes(reading, asked, named), *notes),
        older=reading.older,
        notices=_once([*notices, *_in_clear_text(tree)]),
    )


def _no_paths(manifest: Manifest | None, tree: Tree, file: File) -> Iterator[Problem]:
    """Yield a problem for each path that no file system accepts."""
    named = _named_paths(manifest) if manifest else ()
    for path in (*path_keys(), *named):
        text = at(tree, path)
        if isinstance(text, str) and not is_path(real_path(file).parent / text):
            place = tree.values.get(path, Place(str(file)))
            yield unread(place, path, f"a path of {len(text):,} characters, which is too long for a path")


def _in_clear_text(tree: Tree) -> Iterator[Problem]:
    """Yield warnings about values that look like secrets."""
    for path, place in tree.values.items():
        text = at(tree, path)
        if isinstance(text, str) and path[:1] != ("secrets",) and is_clear_text(text):
            what = "looks like a secret in clear text (not shown)"
            hint = "put it into a file or a variable: secrets: {NAME: {file: PATH}} or {env: VARIABLE}"
            if path[:2] == ("model", "source"):
                hint = f"{hint}, with model.credentials: NAME"
            yield Problem(place, dotted(path), f"{what}; {hint}", hint=hint, code="clear-text")


def unvalidated(given: Given) -> Tree:
    """Return all layers merged and interpolated, without validation. Raise Refused if the manifest cannot be read."""
    file, _ = overlays.split(_read_manifest(given, Reading(given.environ)))
    layers = Layers(
        options=read_options(given), environment=read_environment(given), overlays=Tree(value={}), manifest=file
    )
    whole = _Whole.of(layers.merged(), given.environ)
    return interpolate(whole.tree, whole.names)


def _once(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Remove duplicates: problems of parts that layers share, and of files that are extended twice."""
    found: dict[tuple[object, ...], Problem] = {}
    for problem in problems:
        place = problem.place
        found.setdefault((place.source, place.line, place.column, place.layer, problem.key, problem.message), problem)
    return tuple(found.values())


@dataclass(frozen=True)
class _Whole:
    """A merged tree before interpolation, without its variables and profiles, and the names for interpolation."""

    tree: Tree
    names: Names
    profiles: profiles.Found

    @staticmethod
    def of(tree: Tree, environ: Mapping[str, str]) -> "_Whole":
        names, faults = resolve(tree, environ)
        rest, alone = profiles.split(tree)
        faults += [fault for fault in tree.faults if fault.path[:1] == ("variables",)]
        rest = without(rest, ("variables",))
        rest.faults += faults
        return _Whole(rest, names, profiles.read(alone, names))

    def of_profiles(self) -> Iterator[Problem]:
        """Yield the problems of all profiles, whether selected or not.

        Each profile is applied over everything else, so that none of its values is hidden. Unset environment variables
        are ignored, because they may be set on the machine of the profile.
        """
        yield from self.profiles.problems
        for values in self.profiles.values:
            _, problems = _validated(interpolate(merged(self.tree, values), self.names))
            yield from (one for one in problems if one.place.layer.startswith("profile ") and one.code != "unset")


def _of_overlays(layers: Layers, named: Mapping[str, Tree], environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems of all overlays, whether selected or not.

    Each overlay is applied over everything else, so that none of its values is hidden. Missing keys and unset
    environment variables are ignored.
    """
    if not named:
        return
    low = (layers.overlays, layers.environment, layers.options, layers.manifest)
    known: set[str] | None = None
    for tree in (merged(*low), *(merged(*low, overlay) for overlay in named.values())):
        whole = _Whole.of(tree, environ)
        found = [*_validated(interpolate(whole.tree, whole.names))[1], *whole.of_profiles()]
        if known is None:
            known = set(map(str, found))
        yield from (one for one in found if str(one) not in known and one.code not in ("missing-key", "unset"))


def _validated(tree: Tree) -> tuple[Manifest | None, list[Problem]]:
    problems = _of_faults(tree)
    try:
        return Manifest.model_validate(tree.value), problems
    except ValidationError as error:
        return None, [*problems, *(fix_at_definition(one, tree) for one in from_validation(error, tree))]


def _of_faults(tree: Tree) -> list[Problem]:
    found = (problem for fault in tree.faults if (problem := from_fault(fault)))
    return [fix_at_definition(problem, tree) for problem in found]


def _taken(whole: _Whole, choose: Choose | None) -> tuple[Profile | None, tuple[str, ...]]:
    """Return the profile for this machine, and notes about the selection."""
    found = whole.profiles.profiles
    if not found or choose is None:
        return None, ()
    # hardware.device determines the examined devices; its own problems are reported by the validation.
    device = interpolate(whole.tree, whole.names).value
    wanted = device.get("hardware", {}).get("device", "auto") if isinstance(device.get("hardware"), dict) else "auto"
    reasons = choose(str(wanted), found)
    looked = [f"{one.name} ({one.place}): {why}" for one, why in zip(found, reasons, strict=False)]
    if reasons[-1] == "":
        last = found[len(reasons) - 1]
        return last, (f"profile {last.name} ({last.place})", *(f"not profile {text}" for text in looked[:-1]))
    return None, tuple(f"not profile {text}" for text in looked)


def _notes(reading: Reading, asked: tuple[overlays.OverlayRef, ...], named: Mapping[str, Tree]) -> Iterator[str]:
    """Yield the files and overlays that contributed, as text."""
    own = {File(one.name) for one in asked if one.is_file}
    if bases := [str(file) for file in reading.files[1:] if file not in own]:
        yield f"extends {', '.join(bases)}"
    for one in asked:
        by = "" if one.place.source.startswith("--") else f" by {one.place}"
        yield f"overlay {one.name}{by}"


def _read_manifest(given: Given, reading: Reading) -> Tree:
    try:
        return read_file(reading, given.manifest, given.text)
    except OSError as error:
        what, hint = unreadable(error, str(given.manifest), File())
        meant = Hint(hint.text) if hint.fix else Hint()
        raise Refused([unread(Place(str(given.manifest)), (), what, meant)]) from error
