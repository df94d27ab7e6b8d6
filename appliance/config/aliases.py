"""Names that other servers use for keys of this manifest, in lower case and without separators.

Sources: the command-line references of vLLM, text-generation-inference, SGLang and llama.cpp's server, the environment
variables of NVIDIA NIM, the options of DJL Serving and Ollama, and the fields of KServe's InferenceService.
"""

LAYERS = {
    # Kustomize, Helm, Docker Compose; configuration files of editors and linters
    "base": "extends",
    "bases": "extends",
    "import": "extends",
    "imports": "extends",
    "include": "extends",
    "includes": "extends",
    "inherit": "extends",
    "inherits": "extends",
    "environments": "overlays",
    "overrides": "overlays",
    "patches": "overlays",
    "params": "variables",
    "parameters": "variables",
    "vars": "variables",
}

OTHER_SERVERS = {
    # vLLM
    "enforceeager": "",  # Slipway captures CUDA graphs if they are exact
    "enablelogrequests": "observability.log_requests",
    "alloworigins": "endpoints.cors_origins",
    "allowedorigins": "endpoints.cors_origins",
    "toolcallparser": "model.format",
    "reasoningparser": "model.format",
    "toolparser": "model.format",
    # text-generation-inference
    "corsalloworigin": "endpoints.cors_origins",
    "cudamemoryfraction": "hardware.memory_share",
    "hostname": "endpoints.host",
    "maxbatchprefilltokens": "engine.scheduling.max_step_tokens",
    "maxbestof": "limits.max_choices",
    "maxconcurrentrequests": "engine.scheduling.max_running",
    "maxstopsequences": "limits.max_stop",
    "maxtotaltokens": "model.max_context",
    "modelid": "model.source.huggingface.repo",
    "payloadlimit": "limits.max_body",
    # SGLang
    "chunkedprefillsize": "engine.scheduling.max_step_tokens",
    "contextlen": "model.max_context",
    "maxqueuedrequests": "limits.max_waiting",
    "maxrunningrequests": "engine.scheduling.max_running",
    "memfractionstatic": "hardware.memory_share",
    "pagesize": "engine.cache.block_tokens",
    "schedulepolicy": "engine.scheduling.policy",
    "dpsize": "parallelism.data",
    # DJL Serving (Large Model Inference containers)
    "tensorparalleldegree": "parallelism.tensor",
    "maxrollingbatchsize": "engine.scheduling.max_running",
    "maxrollingbatchprefilltokens": "engine.scheduling.max_step_tokens",
    "rollingbatch": "",
    # Ollama
    "numctx": "model.max_context",
    "numthread": "hardware.threads",
    "numparallel": "engine.scheduling.max_running",
    # llama.cpp
    "alias": "model.names",
    "cachetypek": "quantization.kv_cache",
    "cachetypev": "quantization.kv_cache",
    "chattemplatefile": "model.chat_template",
    "reasoningformat": "model.format",
    "nbatch": "engine.scheduling.max_step_tokens",
    "nctx": "model.max_context",
    "nparallel": "engine.scheduling.max_running",
    # NVIDIA NIM
    "nimkvcachepercent": "hardware.memory_share",
    "nimloglevel": "observability.log_level",
    "nimmaxmodellen": "model.max_context",
    "nimmodelname": "model.source.path",
    "nimmodelpath": "model.source.path",
    "nimservedmodelname": "model.names",
    "nimserverport": "endpoints.port",
    # KServe
    "containerconcurrency": "engine.scheduling.max_running",
    "minreplicas": "parallelism.data",
    "maxreplicas": "parallelism.data",
    "storageuri": "model.source",
}
