"""`slipway bundle`, `slipway unpack` and `slipway sbom`: archives for machines without a network."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from appliance.bundle.build import Contents, total_bytes, write_bundle
from appliance.bundle.index import BundleError, OptionError
from appliance.bundle.oci import write_image
from appliance.bundle.sbom import sbom
from appliance.bundle.unpack import manifest_of, unpack, unpack_once
from appliance.config import exits
from appliance.config.environment import environment
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Given, cache_folder, load
from appliance.config.yaml_loader import Place
from appliance.planning.memory import spell_bytes
from appliance.planning.plan import Plan
from appliance.planning.validate import resolve_downloads


def bundle(options: argparse.Namespace, given: Given, plan: Plan) -> int:
    """Write the bundle of a manifest. Raise Refused."""
    path = options.output or Path(f"{options.manifest.stem}.{'oci' if options.oci else 'bundle'}.tar")
    plain = path.with_name(f"{path.name}.layer") if options.oci else path

    def write() -> None:
        bill = options.sbom.read_bytes() if options.sbom is not None else sbom(environment()).encode()
        contents = Contents(bill, options.image, options.image_archive, options.sign)
        try:
            index = write_bundle(resolve_downloads(load(given), given.environ), plan, contents, plain)
            if options.oci:
                write_image(plain, path)
        finally:
            if options.oci:
                plain.unlink(missing_ok=True)
        signed = ", signed" if options.sign is not None else ""
        print(f"{path}: {len(index.files)} files, {spell_bytes(total_bytes(index.files))}{signed}")
        print(f"serve it with: slipway serve --bundle {path}")

    return _reported("bundle", path, write)


def unpack_into(options: argparse.Namespace) -> int:
    """Verify and unpack a bundle."""
    folder = options.output or Path(
        options.bundle.name.removesuffix(".tar").removesuffix(".bundle").removesuffix(".oci")
    )

    def write() -> None:
        index = unpack(options.bundle, folder, options.public_key)
        print(f"{folder}: {len(index.files)} files verified; serve it with: slipway serve {manifest_of(folder)}")
        if index.image.archive:
            print(f"load the image with: docker load -i {folder / index.image.archive}")
        elif index.image.reference:
            print(f"image: {index.image.reference}")

    return _reported("unpack", options.bundle, write)


def print_sbom(options: argparse.Namespace) -> int:
    def write() -> None:
        text = sbom(environment())
        if options.output is None:
            print(text, end="")
        else:
            options.output.write_text(text, encoding="utf-8")

    return _reported("sbom", options.output or Path("standard output"), write)


def unpacked(path: Path, key: Path | None) -> Path:
    """Return the manifest of a bundle, unpacked in the cache folder. Raise Refused."""
    cache = cache_folder(environment())
    if cache is None:
        message = "HOME and XDG_CACHE_HOME are not set; use `slipway unpack`, and serve its manifest"
        raise Refused([Problem(Place(str(path)), "", message)])
    try:
        return manifest_of(unpack_once(path, cache / "bundles", key))
    except (BundleError, OSError) as error:
        message = _message(error, path).removeprefix(f"{path}: ")
        raise Refused([Problem(Place(str(path)), "", message)], _exit(error)) from error


def _reported(command: str, path: Path, run: Callable[[], None]) -> int:
    """Run and return the exit code; print one message for an error of a bundle or file."""
    try:
        run()
    except (BundleError, OSError) as error:
        message = _message(error, path)
        name = "" if message.startswith(str(path)) else f"{path}: "
        print(f"slipway {command}: {name}{message}", file=sys.stderr)
        return _exit(error).number
    return exits.OK.number


def _exit(error: BundleError | OSError) -> exits.Exit:
    """Return the exit code: for a damaged bundle, for an option that names a wrong file, or for another failure."""
    if isinstance(error, BundleError):
        return exits.MANIFEST if isinstance(error, OptionError) else exits.INTEGRITY
    named = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError
    return exits.MANIFEST if isinstance(error, named) else exits.INTERNAL


def _message(error: BundleError | OSError, path: Path) -> str:
    if isinstance(error, BundleError):
        return str(error).removeprefix(f"{path}: ")
    return f"{error.filename or path}: {(error.strerror or str(error)).lower()}"
