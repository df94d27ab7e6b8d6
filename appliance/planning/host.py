"""Host memory that is not part of the device: other processes, page-locked memory, and buffers while weights load.

Process sizes are resident memory in MiB, measured while the demo model was served: launcher 43, supervisord 27,
restart monitor 26, gateway 66. In the gateway, a tokenizer with a large vocabulary takes about 1 KiB per entry.
"""

from appliance.planning.derivation import Account, Step, number, product
from appliance.planning.memory import Host

MIB = 2**20
APPLIANCE_BYTES = 176 * MIB
TOKENIZER_BYTES = 1024  # per vocabulary entry
# Resident memory of an engine process that computes on a GPU: torch with the CUDA libraries. Assumed.
CUDA_PROCESS_BYTES = 2048 * MIB


def appliance_bytes(vocab: int) -> int:
    return APPLIANCE_BYTES + TOKENIZER_BYTES * vocab


def host_memory(
    *, device: str, engines: int, vocab: int, pinned: int, loading: int, adapters: int = 0
) -> tuple[Host, Account]:
    """Return the host memory and its derivation.

    `loading` is the number of bytes that reading one matrix takes, and `pinned` the page-locked bytes of one engine,
    `adapters` those of its adapter cache. On a CPU all are part of the engines' own budget, and so are the engine
    processes.
    """
    steps = [
        Step("launcher, supervisord, restart monitor, gateway", number(APPLIANCE_BYTES), APPLIANCE_BYTES),
        product("tokenizer (entries)", vocab, TOKENIZER_BYTES),
    ]
    process = 0
    if device == "cuda":
        process = engines * CUDA_PROCESS_BYTES
        steps += [
            product("engine processes", engines, CUDA_PROCESS_BYTES),
            product("page-locked copies", engines, pinned),
            product("one matrix while it is loaded", engines, loading),
        ]
        if adapters:
            steps.append(product("adapters in the host cache", engines, adapters))
    on_gpu = device == "cuda"
    host = Host(
        appliance=appliance_bytes(vocab),
        engines=process,
        pinned=engines * pinned if on_gpu else 0,
        loading=engines * (loading + adapters) if on_gpu else 0,
        shared=0,  # engines and gateway communicate over sockets
    )
    return host, Account("host", "host memory in addition to the engines' memory budget", tuple(steps))
