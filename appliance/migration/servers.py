"""All servers whose options are converted."""

from appliance.migration.djl import DJL
from appliance.migration.llama_cpp import LLAMA_CPP
from appliance.migration.ollama import OLLAMA
from appliance.migration.sglang import SGLANG
from appliance.migration.tgi import TGI
from appliance.migration.vllm import VLLM

SERVERS = (VLLM, SGLANG, TGI, LLAMA_CPP, OLLAMA, DJL)
