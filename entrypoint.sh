#!/bin/sh
# What `docker run slipway …` means:
#
#   (nothing), serve, --port 9000 …     serve /manifest.yaml if it was mounted, else the demo
#   serve FILE …, FILE …                serve that manifest
#   check FILE, plan FILE, chat, env …  any other subcommand of slipway
#
# All arguments go on exactly as they came. The shell is replaced, so that slipway is process 1 and gets the signals.
set -eu

# Kernels for GPUs that were compiled with the image. Triton writes to its cache as well: so it gets links to them.
compiled=${0%/*}/compiled
if [ -d "$compiled/libcuda" ]; then
    export TRITON_LIBCUDA_PATH="$compiled/libcuda"
    { mkdir -p "$TRITON_CACHE_DIR" && ln -sf "$compiled"/* "$TRITON_CACHE_DIR"; } ||
        echo "entrypoint: no links to $compiled: kernels are compiled when they are first used" >&2
fi

case ${1-} in
check | plan | chat | schema | healthcheck | env | version | help | --help | -h | --version)
    exec slipway "$@"
    ;;
serve)
    shift
    ;;
esac

case ${1-} in
'' | -*) ;;
*) exec slipway serve "$@" ;;
esac

if [ -e /manifest.yaml ]; then
    exec slipway serve /manifest.yaml "$@"
fi
exec slipway serve /opt/slipway/manifests/demo.yaml "$@"
