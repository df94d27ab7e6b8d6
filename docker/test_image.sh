#!/bin/sh
# Builds the image and shows that it keeps its promises: docker/test_image.sh [-k]      (-k keeps image and work folder)
#
# With Docker or Podman the image is built and run by them. Where no engine runs, buildah does both with chroot isolation,
# on a base that debootstrap makes; that takes root and the packages buildah and debootstrap.
#
# BASE                       base image; default: the Dockerfile's, or with buildah a Debian made here
# TORCH_INDEX, PIP_*         passed on to the build; folders and files that PIP_FIND_LINKS and PIP_CERT name are mounted
# WORK                       folder for base and storage, about 5 GB; default /var/tmp/slipway-image
set -eu
cd "$(dirname "$0")/.."

WORK=${WORK:-/var/tmp/slipway-image}
IMAGE=localhost/slipway-test
keep=false
test "${1-}" = -k && keep=true

say() { printf '%s\n' "== $*"; }
fail() { printf '%s\n' "test_image: $*" >&2; exit 1; }

if docker info >/dev/null 2>&1; then engine=docker
elif podman info >/dev/null 2>&1; then engine=podman
elif command -v buildah >/dev/null && command -v debootstrap >/dev/null; then engine=buildah
else fail "needs a running Docker or Podman, or the packages buildah and debootstrap (as root)"
fi
say "engine: $engine"

# The build sees what pip needs on this host.
set --
for name in TORCH_INDEX PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT; do
    eval "value=\${$name-}"
    test -n "$value" && set -- "$@" --build-arg "$name=$value"
done

build_with_buildah() {
    mkdir -p "$WORK"
    if ! test -e "$WORK/base.complete"; then
        say "making a Debian base with debootstrap"
        rm -rf "$WORK/base"
        debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$WORK/base" >"$WORK/debootstrap.log" 2>&1 ||
            fail "debootstrap failed, see $WORK/debootstrap.log"
        rm -rf "$WORK"/base/var/cache/apt/archives/*.deb "$WORK"/base/var/lib/apt/lists/*
        touch "$WORK/base.complete"
    fi
    if test -z "${BASE-}"; then
        BASE=localhost/slipway-base
        if ! $buildah images -q "$BASE" >/dev/null 2>&1; then
            container=$($buildah from scratch)
            $buildah copy -q "$container" "$WORK/base" / >/dev/null
            $buildah commit -q --rm "$container" "$BASE" >/dev/null
        fi
    fi
    for path in "${PIP_FIND_LINKS-}" "${PIP_CERT-}"; do
        test -e "$path" && set -- "$@" --volume "$path:$path:ro"
    done
    $buildah bud --isolation chroot --format docker --layers --build-arg "BASE=$BASE" "$@" -t "$IMAGE" .
}

buildah="buildah --root $WORK/storage --runroot $WORK/run --storage-driver vfs"
say "building"
case $engine in
buildah) build_with_buildah "$@" ;;
*) $engine build ${BASE:+--build-arg "BASE=$BASE"} "$@" -t "$IMAGE" . ;;
esac
