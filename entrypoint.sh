#!/bin/sh
# Arguments of `docker run slipway …`:
#
#   (nothing), serve, --port 9000 …     serve /manifest.yaml, the hosting platform's model, or the demo
#   serve FILE …, FILE …                serve that manifest
#   check FILE, plan FILE, chat, env …  any other subcommand of slipway
#
# slipway itself decides whether the first argument is a subcommand or a manifest. All arguments are passed on unchanged.
# exec replaces the shell, so that slipway is process 1 and receives the signals. The kernel drops signals to process 1
# that it does not handle yet, so stop signals end this shell, and are blocked until slipway has its handlers.
trap 'exit 0' TERM INT QUIT
set -eu

slipway() {
    signals=TERM,INT,QUIT,HUP
    if env --block-signal=$signals true 2>/dev/null; then exec env --block-signal=$signals slipway "$@"; fi
    exec slipway "$@"
}

# Kernels for GPUs that were compiled with the image. Triton also writes to its cache, so the cache gets links to them.
compiled=${0%/*}/compiled
if [ -d "$compiled/libcuda" ]; then
    export TRITON_LIBCUDA_PATH="$compiled/libcuda"
    { mkdir -p "$TRITON_CACHE_DIR" && ln -sf "$compiled"/* "$TRITON_CACHE_DIR"; } ||
        echo "entrypoint: no links to $compiled: kernels are compiled when they are first used" >&2
fi

case ${1-} in
--help | -h | --version) slipway "$@" ;;
'' | -*) slipway serve "$@" ;;
*) slipway "$@" ;;
esac
