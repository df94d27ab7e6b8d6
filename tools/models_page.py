"""Writes docs/models.md from the declarations in engine/models: which architectures are served, and what of them."""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.models.families import ARCHITECTURES, FAMILIES  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Models that are served

<!-- made by tools/models_page.py from engine/models; a test keeps it so -->

Any checkpoint folder in Hugging Face layout whose `config.json` names one of these architectures: safetensors (one file
or shards), float32, bfloat16 or float16, old and new spellings of the configuration (`rope_theta` or `rope_parameters`,
`torch_dtype` or `dtype`, `text_config`). Rotary scalings: linear, dynamic, llama3, yarn, longrope. Sliding windows free
the blocks they leave behind. Mixtures of experts are served by the compiled kernels of a CPU, with any
weights that those have, by the fused ones of a GPU, and by torch. [Encoder-decoder
models](#encoder-decoder-models), [models that pool](#models-that-pool) and [quantized
checkpoints](#quantized-checkpoints) have sections of their own.

| architecture | family | declared in |
|---|---|---|
"""

TAIL = """
Each is held to transformers in float32: logits within 1e-4, greedy tokens and logprobs through the whole engine
(`tests/engine/layers`, `tests/engine/test_against_transformers.py`).

## Text decoders of models that read more than text

A `…ForConditionalGeneration` whose `text_config` names one of these decoders is served without its other parts if the
manifest says `model.text_only: true`. Requests can then hold text only, and the numbers are those of the whole model.
`slipway check` names the key for such a checkpoint.

| decoder in `text_config` | served as | models |
|---|---|---|
| `gemma3_text` | `Gemma3ForCausalLM` | Gemma 3 |
| `llama` | `LlamaForCausalLM` | LLaVA and others |
| `mistral` | `MistralForCausalLM` | Mistral Small 3.1 and others |
| `qwen2`, `qwen2_vl_text`, `qwen2_5_vl_text` | `Qwen2ForCausalLM` | Qwen2-VL, Qwen2.5-VL and others |
| `qwen3`, `qwen3_vl_text` | `Qwen3ForCausalLM` | Qwen3-VL |

## Encoder-decoder models

BART, mBART, Pegasus, Marian and M2M100, which NLLB is one of, read a source with an encoder, and a decoder that attends
to it writes the reply: a summary, a translation. They are asked by `/v1/completions`, whose prompt is the source;
`decoder_prompt` says what the reply begins with, such as the target language ([http.md](http.md#completions)).
The likeliest token is taken, as by transformers, unless a request, `engine.sampling.temperature` or the checkpoint
(`do_sample` in generation_config.json) says otherwise.

- Sources and replies share one table of tokens. Checkpoints with two (`share_encoder_decoder_embeddings: false`) are
  refused.
- The tokenizer is read from `tokenizer.json`. Marian's and M2M100's original files (`source.spm`,
  `sentencepiece.bpe.model` with `vocab.json`) have none: it has to be made of them first.
- There is no beam search, for these models as for all others: published scores of translations are often of 4 or 5
  beams. Of generation_config.json sampling defaults, `max_new_tokens`, end tokens, `forced_bos_token_id` and
  `bad_words_ids` are taken; `num_beams`, `no_repeat_ngram_size`, `length_penalty`, `min_length` and
  `forced_eos_token_id` are not.
- Compiled kernels of a CPU do not serve them, so torch does, and weights are not rounded to 8 or 4 bits there. On a GPU
  Triton's do.
- A source is read in one step: `engine.scheduling.max_step_tokens` has the longest one and a token of each running
  request. There is no prefix cache, as what is kept of a source depends on all of it.

## Models that pool

Encoders and bare decoders (`…Model`) give vectors, `…ForSequenceClassification` and `…ForTokenClassification` the
scores of their labels. What stands beside the encoder of an embedding model is read from sentence-transformers' files:
`modules.json` with Pooling (first token, last token, mean, maximum), Dense and Normalize, the longest text, prompts. A
decoder with these files embeds, and `model.task` asks for what no file says:

| `model.task` | of | gives |
|---|---|---|
| `embed` | an encoder; a decoder | a vector of each text, by `model.pooling` |
| `classify` | a classifier | a score of each label |
| `score` | a classifier of one label; a decoder | of a decoder: the probability of yes where yes or no could follow |

Encoders, and decoders whose attention reads both ways (EmbeddingGemma), keep no cache: a prompt is computed in one
step, which must be as long (`engine.scheduling.max_step_tokens`). Decoders embed with chunks and, where the last token
alone counts, with cached prefixes. With compiled kernels of a CPU a prompt's numbers depend on nothing beside it, bit
for bit; weights may be rounded to 8 or 4 bits, and ranks share them. On a GPU Triton's fused kernels compute all
prompts of a step together.

## Quantized checkpoints

Taken as they are, never rounded again: compiled kernels of a CPU multiply by the checkpoint's own whole numbers, Triton
kernels of a GPU by its fp8. Everywhere else weights are restored, to the type of the activations, as they are loaded;
the plan says what that takes.

| checkpoint | served | held as |
|---|---|---|
| gptq (`gptq`, `gptq_v2`) | 4 bits, and 8 where `sym` is true; also `desc_act` | 4 bits; 8 bits in groups |
| awq | 4 bits, version gemm | 4 bits |
| compressed-tensors, pack-quantized | 4 bits, and 8 where symmetric; also `actorder` | 4 bits; 8 bits |
| compressed-tensors, int-quantized | 8 bits, symmetric; activations plain or dynamic int8 | 8 bits |
| compressed-tensors, float-quantized | fp8 by matrix, output or block; activations plain, dynamic, static | fp8 |
| fp8 (transformers, AutoFP8) | fp8 by matrix or block; activations dynamic or static | fp8 |
| modelopt | `quant_algo: FP8` in `config.json` or `hf_quant_config.json`: fp8 by matrix, activations static | fp8 |
| one `.gguf` file: Llama, Mistral, Qwen2, Qwen3 | every type that the package `gguf` restores | see below |

Checkpoints may bring scales for an 8-bit KV cache: as tensors of one number per layer (`k_proj.k_scale` and
`v_proj.v_scale` of ModelOpt, `self_attn.k_scale` and `self_attn.v_scale` of llm-compressor, `attn.k_scale` of vLLM,
`k_proj.output_scale` of AutoFP8, `kv_scale`), or in `kv_cache_scales.json` (AMD Quark), which is used if there are
both. `quantization.kv_cache: fp8` applies them; with any other type of cache they are ignored. Scales of queries and
of attention probabilities are accepted and not used, because attention is not computed in 8 bits.

Scales stay in the checkpoint's type: float16, bfloat16 or float32. Groups have a multiple of 32 inputs, or all of a row
(4 bits with one scale an output are held in groups of 128, all with that scale). Activations are rounded to 8 bits row
by row, as always beside weights in whole numbers. With act order, inputs are gathered into the order of the groups;
matrices that are multiplied by together (q, k, v; gate, up) must share that order, as those of one calibration do.
Where only some of these are quantized, or in different ways, they are restored to float32. Projections that the
checkpoint leaves out stay in its type. Everything else is refused with its method, bits and reason.

### fp8

`float8_e4m3fn` with scales of a whole matrix, of each output or of blocks of 128 x 128 (`weight_scale`, or
`weight_scale_inv` as transformers names it). With Triton kernels a matrix takes a byte a number, and matrices that are
multiplied by together keep the scales of each (`engine/weights/fp8.py`). The product depends on the GPU and the
checkpoint:

| scales | compute capability | activations | product |
|---|---|---|---|
| of matrices or outputs | 9.0 to 10.3, `bfloat16` | rounded to fp8, by token or `input_scale` | torch's |
| of matrices or outputs | 8.9, 12.0; `float16`; `hardware.batch_invariant` | the same | Triton's |
| of blocks | 8.9 and newer | rounded to fp8, by 128 inputs of a token | Triton's, in float32 block by block |
| any | older; checkpoints whose activations are plain | as they are | Triton's: weights are widened as they are read |

Norms and activation functions round what they write (`kernels/rms_norm_quantized.py`, `activation_quantized.py`). Where
several matrices that read the same rows have static scales of their own, the largest is taken for all. The embedding,
norms, routers, routed experts and the head are never in fp8: where the checkpoint has them so they are restored, to the
type of the activations. On a CPU and with torch all of it is restored, exactly, and activations are not rounded: the
same checkpoint gives slightly other numbers there.
Ranks cut blocks along inputs only between them; others are refused, or restored by `hardware.kernels: torch`.

`quantization.weights: fp8` makes the same of a float32, bfloat16 or float16 checkpoint when it is loaded on a GPU: a
scale for each output, activations rounded token by token; a model with experts is refused, as most of it would stay as
it is. Other kinds of fp8 are refused: `e5m2`, `fnuz`, blocks of other sizes, scales in `e8m0`, which MX formats have.

Of a GGUF file, Q4_0 and Q8_0 are held as they are, F32, F16 and BF16 as those of any checkpoint; all other types are
restored to float32, or rounded by `quantization.weights`. Tokenizer, chat template, configuration and end tokens
are read from the file, unless its folder has files of its own for them ([sources.md](sources.md#a-gguf-file)).

## Another architecture

One file of declared parts and one line in `engine/models/families.py`. A checkpoint folder may also bring its own:
`slipway_model.py` with `ARCHITECTURES` and `declare(config)`, used only with `model.trust_remote_code: true`, because
its code is then run.
"""


def models_page() -> str:
    """The page as text."""
    lines = []
    for name in sorted(ARCHITECTURES):
        (family,) = (module for module in FAMILIES if name in module.ARCHITECTURES)
        first = " ".join((inspect.getdoc(family) or "").split("\n\n")[0].split())
        lines.append(f"| `{name}` | {first} | `engine/models/{family.__name__.rpartition('.')[2]}.py` |\n")
    return HEAD + "".join(lines) + TAIL


if __name__ == "__main__":
    write_pages(__doc__, {"models.md": models_page})
