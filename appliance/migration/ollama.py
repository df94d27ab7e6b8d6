"""Instructions of an Ollama Modelfile. Source: Ollama's Modelfile reference."""

from appliance.migration.rules import Key, Keys, Missing, Rule, Server, Unneeded, Values
from appliance.migration.values import NO_GGUF_ADAPTER, gguf_repository, source

_CLIENTS = "clients send it"


def _from(text: str) -> Values:
    """Return the source of FROM: a .gguf file, a folder, or a repository of the hub."""
    if text.startswith(("hf.co/", "huggingface.co/")):
        return gguf_repository(text)
    if not text.startswith(("/", ".", "~")) and not text.endswith(".gguf"):
        raise ValueError(
            "is a model of Ollama's library, which is not downloaded; name a .gguf file or a repository: "
            "slipway init ORG/NAME --from Modelfile"
        )
    return source(text)


_RULES: dict[str, Rule] = {
    "FROM": Keys(("model.source",), _from),
    "TEMPLATE": Missing("the chat template of the file is used; model.chat_template takes a Jinja template"),
    "SYSTEM": Missing("clients send the system message"),
    "ADAPTER": Missing(NO_GGUF_ADAPTER),
    "LICENSE": Unneeded("the license has no effect"),
    "MESSAGE": Missing("clients send the messages"),
    "REQUIRES": Unneeded("the version of Ollama has no effect"),
    "num-ctx": Key("model.max_context"),
    "num-predict": Key("limits.max_output_tokens", automatic=("-1", "-2")),
    "num-batch": Key("engine.scheduling.max_step_tokens"),
    "num-thread": Key("hardware.threads"),
    "num-gpu": Missing("hardware.device selects the device of the complete model"),
    "temperature": Key("engine.sampling.temperature"),
    "top-k": Key("engine.sampling.top_k"),
    "top-p": Key("engine.sampling.top_p"),
    "min-p": Key("engine.sampling.min_p"),
    "repeat-penalty": Key("engine.sampling.repetition_penalty"),
    "repeat-last-n": Missing("repetition_penalty counts all tokens of the request"),
    "seed": Missing(_CLIENTS),
    "stop": Missing("end tokens come from the checkpoint; clients send further stop strings"),
    "mirostat": Missing("this sampler is not implemented", neutral=("0",)),
    "mirostat-tau": Missing("this sampler is not implemented"),
    "mirostat-eta": Missing("this sampler is not implemented"),
    "tfs-z": Missing("this sampler is not implemented", neutral=("1", "1.0")),
}
OLLAMA = Server("Ollama", "Ollama", 11434, _RULES, local=True)
