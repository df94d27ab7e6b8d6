"""Write docs/models.md from engine/models and engine/formats: supported architectures and number formats."""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.formats.registry import BUILT_IN  # noqa: E402
from engine.models.families import ARCHITECTURES, FAMILIES  # noqa: E402
from engine.models.foreign import REFUSED  # noqa: E402
from engine.models.gguf_families import FAMILIES as GGUF  # noqa: E402
from tools.pages import write_pages  # noqa: E402

HEAD = """# Supported models

<!-- made by tools/models_page.py from engine/models; a test keeps it so -->

Check here that Slipway can serve your checkpoint, and with which kernels and number formats. Supported is any
checkpoint folder in Hugging Face layout whose `config.json` names one of the architectures below: safetensors (one file
or shards), float32, bfloat16 or float16, old and new spellings of the configuration (`rope_theta` or `rope_parameters`,
`torch_dtype` or `dtype`, `text_config`). Rotary scalings are linear, dynamic, llama3, yarn and longrope. Sliding
windows free blocks that are out of reach. Mixtures of experts run with the compiled kernels of a CPU (with all their
weight formats), with the fused kernels of a GPU, and with torch. Separate sections describe
[encoder-decoder models](#encoder-decoder-models), [other decoders](#decoders-without-a-declaration),
[pooling models](#pooling-models) and [quantized checkpoints](#quantized-checkpoints).
[tested-models.md](tested-models.md) lists the tested properties of each architecture.

| architecture | family | declared in |
|---|---|---|
"""

TAIL = """
The tests compare each architecture with transformers in float32: logits within 1e-4, greedy tokens and logprobs through
the complete engine (`tests/engine/layers`, `tests/engine/test_against_transformers.py`). Architectures whose code is
not part of transformers (InternLM 2, Baichuan, Qwen 1, MiniCPM, EXAONE 3, Ling, Arctic, Jina 2) are compared with an
equivalent model of transformers under other tensor names; their code is never executed.

Checkpoints whose computation would differ are refused with the key of `config.json`: clipped queries (`clip_qkv`, as in
MPT 7B StoryWriter), norms of q and k over all heads with a bias (`qk_ln` of MPT), and residuals after the norm (BLOOM).
ALiBi (BLOOM, MPT, Falcon RW, Baichuan 13B) is computed in float32. transformers rounds the bias of Falcon RW to
bfloat16 and ignores `alibi_bias_max` of MPT.

Layers of Llama 4 with rotary positions attend within chunks of `attention_chunk_size` tokens. Their keys and values are
freed like those of a sliding window, as soon as a sequence enters the next chunk.

The compiled kernels of a CPU leave some operations to torch: squared ReLU (Nemotron, Persimmon), xIELU (Apertus), the
weights of SparseMixer (Phi-3.5-MoE), output gates of attention (AFMoE, Step-3.5) and clamped gates (the last layers of
Step-3.5). `slipway plan` names them.

## Recurrent and hybrid models

Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid), Kimi Delta Attention (Kimi Linear), Mamba (Mamba, Falcon Mamba,
Jamba), Mamba-2 (Mamba-2, Granite 4, Bamba, Falcon-H1, Nemotron-H, Zamba2), lightning attention (MiniMax-Text-01 and
M1), RG-LRU (RecurrentGemma) and short convolutions (LFM2) keep a state of fixed size per request, in float32. Prefix
caching works: snapshots of the state are kept at block boundaries
([architecture.md](architecture.md#recurrent-state)), and [memory.md](memory.md#recurrent-state) describes their size.

- They run with torch, with the compiled kernels of a CPU and with Triton. The compiled kernels leave output gates of
  attention and gates of short convolutions to torch, and copies of hidden states (Zamba2).
- With `parallelism.tensor`, heads are divided, or the channels of a Mamba mixer. If a Mamba-2 mixer has fewer groups
  than ranks, several ranks have the same group, with its B and C. The norm of a group, and that of all heads in
  lightning attention, is then computed by torch, with a sum over the ranks.
- The original configurations of MiniMax (`attn_type_list`, `layernorm_…_alpha`) and those of transformers (`-hf`) are
  supported. transformers rotates complete heads, the original configurations `rotary_dim` dimensions.
- Layers of Zamba2 share one or two transformer blocks; each use has its own low-rank updates, part of the checkpoint.
  `use_long_context` is refused.
- The matrices of the gates of RG-LRU are never quantized.
- The projections to dt, B and C and to the time steps of Mamba (`x_proj`, `dt_proj`) are never quantized at load.
- The tensors of multi-token prediction (`mtp.`) are not used. Experts of Nemotron-H in a latent space
  (`moe_latent_size`) are refused.

## Multi-head latent attention

The KV cache of DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Youtu and MiniCPM3 has for each token and layer its latent
(`kv_lora_rank`) and its rotated key (`qk_rope_head_dim`), which all heads share: 576 numbers in DeepSeek-V3, in place
of 40,960 of expanded keys and values. Each rank of tensor parallelism has all of them. They are stored in 16 or 32
bits, not in 8. `kv_b_proj` is divided into two matrices for each head and is never quantized; if the checkpoint stores
it quantized, it is dequantized at load. Layers for multi-token prediction are not used. LongCat-Flash has two such
attentions in a layer.

DeepSeek-V3.2 and GLM-5 read only the `index_topk` keys of a sequence that an indexer selects. Its keys
(`index_head_dim` numbers per token and layer with an indexer) are further pages of the KV cache, in the same type.
Each rank computes the complete selection. Up to `index_topk` tokens, results are those of dense attention, with the
compiled kernels bit for bit. The original code multiplies queries and keys of the indexer by a Hadamard matrix and
rounds them to fp8; like transformers, Slipway does neither. The weights of the indexer's heads (`weights_proj`) are
never quantized.

## Models that read images, videos or audio

These models have a tower, which computes features of the patches of an image or of an audio clip, and a projector,
which makes the embeddings of the prompt's placeholder tokens of them. The text decoder is one of the
[decoders](#text-decoders-of-multimodal-models) of the next section.

| architecture | tower and projector | models |
|---|---|---|
| `AriaForConditionalGeneration` | SigLIP, images of any size; learned queries attend to its features | Aria |
| `Blip2ForConditionalGeneration` | tower with a class token; Q-Former | BLIP-2 with OPT |
| `Gemma3ForConditionalGeneration` | SigLIP; mean of squares of patches | Gemma 3 (4B, 12B, 27B) |
| `Gemma4ForConditionalGeneration` | images of any size; mean of squares of patches; a Conformer for audio | Gemma 4 |
| `Glm46VForConditionalGeneration` | images of any size; a convolution joins squares of patches | GLM-4.6V |
| `Glm4vForConditionalGeneration` | the same | GLM-4.1V, GLM-4.6V-Flash |
| `Glm4vMoeForConditionalGeneration` | the same | GLM-4.5V, GLM-4.6V |
| `GlmOcrForConditionalGeneration` | the same, with norms of queries and keys | GLM-OCR |
| `Idefics2ForConditionalGeneration` | SigLIP, images of any size; perceiver resampler | Idefics2 |
| `Idefics3ForConditionalGeneration` | SigLIP for tiles; patches are joined | Idefics3 |
| `InternVLForConditionalGeneration` | InternViT for tiles; patches are joined | InternVL 2.5 and 3 (-hf) |
| `KimiVLForConditionalGeneration` | MoonViT, images of any size | Kimi-VL |
| `LightOnOcrForConditionalGeneration` | Pixtral; squares of patches are joined | LightOnOCR |
| `Llama4ForConditionalGeneration` | tower with rotary positions for tiles | Llama 4 Scout and Maverick |
| `LlavaForConditionalGeneration` | CLIP, SigLIP or Pixtral; two layers | LLaVA 1.5, Pixtral 12B |
| `LlavaNextForConditionalGeneration` | CLIP or SigLIP for tiles; two layers | LLaVA-NeXT, Granite Vision |
| `LlavaOnevisionForConditionalGeneration` | SigLIP for tiles; two layers | LLaVA-OneVision |
| `MiniCPMOcrForConditionalGeneration` | SigLIP, images of any size; squares are joined | MiniCPM-OCR |
| `MiniCPMV4_6ForConditionalGeneration` | the same, with a merge between two blocks | MiniCPM-V 4.6 |
| `Mistral3ForConditionalGeneration` | Pixtral; squares of patches are joined | Mistral Small 3.1, Ministral 3 |
| `PaliGemmaForConditionalGeneration` | SigLIP; one layer | PaliGemma 1 and 2 |
| `Phi4MultimodalForCausalLM` | SigLIP for tiles; two layers; a Conformer for audio | Phi-4-multimodal |
| `Qwen2AudioForConditionalGeneration` | audio clips: Whisper's encoder; means of pairs of states | Qwen2-Audio |
| `Qwen2_5OmniForConditionalGeneration` | also audio: Qwen2.5-VL's tower, and an encoder of chunks | Qwen2.5-Omni |
| `Qwen2VLForConditionalGeneration` | images and videos of any size; squares are joined | Qwen2-VL |
| `Qwen2_5_VLForConditionalGeneration` | the same, with windows of attention | Qwen2.5-VL |
| `Qwen3OmniMoeForConditionalGeneration` | also audio: Qwen3-VL's tower, and Qwen3-ASR's encoder | Qwen3-Omni |
| `Qwen3VLForConditionalGeneration` | with learned positions; features of several blocks | Qwen3-VL |
| `Qwen3VLMoeForConditionalGeneration` | the same | Qwen3-VL with experts |
| `Qwen3_5ForConditionalGeneration` | the same, with features of the last block | Qwen3.5 |
| `Qwen3_5MoeForConditionalGeneration` | the same | Qwen3.5 with experts |
| `SmolVLMForConditionalGeneration` | SigLIP for tiles; patches are joined | SmolVLM |

- All items of a step are computed together, and attention is among the patches of an image or of a video's frame. An
  item's embeddings do not depend on the other items.
- The names of tensors may have the prefixes of older and newer exports, such as `vision_tower.` and
  `model.vision_tower.`. Blocks after the feature layer (`vision_feature_layer`) are not loaded.
- A tower runs with the compiled kernels of a CPU, with Triton kernels, or with torch. On a GPU, torch computes the
  blocks of towers with masks (Phi-4-multimodal) or limits (Gemma 4), of Conformers, and of learned queries. On a CPU,
  it computes convolutions of spectrograms, and the scores of learned queries and of local attention. Matrices are kept
  in their stored type, and are not quantized at load.
- With `parallelism.tensor`, each rank has the complete tower, and ranks divide the items of a step: two images of one
  prompt are computed at the same time.
- With `model.text_only: true`, the tower is not loaded. With `model.media.encoder_only: true`, only the tower is
  ([images.md](images.md#a-service-for-the-towers)).
- Tokens of images attend to one another in both directions in layers of Gemma 4 with a window, if the checkpoint has
  `use_bidirectional_attention: vision`.

## Text decoders of multimodal models

A `…ForConditionalGeneration` whose `text_config` names one of these decoders is served without its other parts if the
manifest has `model.text_only: true`. Requests may then contain text only, and results equal the complete model's.
`slipway check` names the key for such a checkpoint if its tower is not supported.

| decoder in `text_config` | served as | models |
|---|---|---|
| `aria_text` | `AriaTextForCausalLM` | Aria |
| `opt` | `OPTForCausalLM` | BLIP-2 |
| `deepseek_v3` | `DeepseekV3ForCausalLM` | Kimi-VL |
| `gemma` | `GemmaForCausalLM` | PaliGemma 1 |
| `gemma2` | `Gemma2ForCausalLM` | PaliGemma 2 |
| `gemma3_text` | `Gemma3ForCausalLM` | Gemma 3 |
| `gemma3n_text` | `Gemma3nForCausalLM` | Gemma 3n |
| `gemma4_text` | `Gemma4ForCausalLM` | Gemma 4 |
| `glm4v_moe_text` | `Glm4MoeForCausalLM` | GLM-4.5V |
| `glm4v_text`, `glm_ocr_text` | `Glm4ForCausalLM` | GLM-4.1V, GLM-OCR |
| `granite` | `GraniteForCausalLM` | Granite Vision |
| `llama` | `LlamaForCausalLM` | LLaVA and others |
| `llama4_text` | `Llama4ForCausalLM` | Llama 4 |
| `ministral3` | `Ministral3ForCausalLM` | Ministral 3 |
| `mistral` | `MistralForCausalLM` | Mistral Small 3.1, Idefics2 and others |
| `phi4_multimodal` (no `text_config`) | `Phi3ForCausalLM` | Phi-4-multimodal |
| `qwen2`, `qwen2_vl_text`, `qwen2_5_vl_text`, `qwen2_5_omni_text` | `Qwen2ForCausalLM` | Qwen2-VL and others |
| `qwen3`, `qwen3_vl_text` | `Qwen3ForCausalLM` | Qwen3-VL |
| `qwen3_moe`, `qwen3_vl_moe_text`, `qwen3_omni_moe_text` | `Qwen3MoeForCausalLM` | Qwen3-VL with experts and others |
| `qwen3_5_text` | `Qwen3_5ForCausalLM` | Qwen3.5, MiniCPM-V 4.6 |
| `qwen3_5_moe_text` | `Qwen3_5MoeForCausalLM` | Qwen3.5 with experts |

## Speech models

Whisper transcribes and translates audio files ([speech.md](speech.md)). Its encoder reads the spectrogram of a window
of 30 s, with 80 or 128 mel bands; its decoder has cross-attention. The head shares the token embedding.

## Encoder-decoder models

BART, mBART, Pegasus, Marian, M2M100 (which includes NLLB), T5 (which includes Flan-T5), mT5 and UMT5 read an input with
an encoder; a decoder with cross-attention generates the reply, such as a summary or a translation. Use
`/v1/completions`: its prompt is the encoder input, and `decoder_prompt` is the beginning of the reply, such as the
target language ([http.md](http.md#completions)). Sampling is greedy, as in transformers, unless a request,
`engine.sampling.temperature` or the checkpoint (`do_sample` in generation_config.json) sets a temperature.

- Encoder and decoder share one token embedding. Checkpoints with two (`share_encoder_decoder_embeddings: false`) are
  refused: they have two vocabularies, and `tokenizer.json` describes one.
- The tokenizer is read from `tokenizer.json`. The original files of Marian and M2M100 (`source.spm`,
  `sentencepiece.bpe.model` with `vocab.json`) must be converted to it first. T5, mT5 and UMT5 also have `spiece.model`,
  which is followed by the `extra_ids` of tokenizer_config.json (`<extra_id_0>` last).
- T5, mT5 and UMT5 have no table of positions, but inputs and replies are limited to `n_positions` tokens (512 if
  config.json has no such key), the length of their training. Raise it in config.json for longer inputs.
- The head of a T5 model is the token embedding unless the checkpoint has `lm_head.weight`. Logits are multiplied by
  `d_model ** -0.5` unless `tie_word_embeddings` or `scale_decoder_outputs` is false; those of mT5 never are.
  transformers 5 ignores `tie_word_embeddings` of UMT5: it scales the logits of published checkpoints, whose config.json
  says false. This changes logprobs and sampling, not greedy replies.
- LongT5, whose encoder has local and transient-global attention, is not supported.
- Beam search is not supported, for these and all other models; published translation scores often use 4 or 5 beams.
  Used keys of generation_config.json are the sampling defaults, `max_new_tokens`, end tokens, `forced_bos_token_id` and
  `bad_words_ids`; `num_beams`, `no_repeat_ngram_size`, `length_penalty`, `min_length` and `forced_eos_token_id` are
  ignored.
- They run with the compiled kernels of a CPU, also with weights rounded to 8 or 4 bits, and on a GPU with Triton's
  kernels. Relative position biases are added in float32.
- An encoder input is computed in one step: `engine.scheduling.max_step_tokens` covers the longest one and a token of
  each running request. There is no prefix cache, because all cached states depend on the complete encoder input.

## Decoders without a declaration

A decoder (`…ForCausalLM`, `…LMHeadModel`) that is not in the list but that the package transformers has is computed by
transformers' own code, with keys and values in Slipway's pages. Install it with
`pip install 'slipway-serve[transformers]'`; the container image does not contain it. `slipway plan` states this in the
line of `hardware.kernels`.

- Chunked prefill, prefix cache, preemption and resumption after a crash work as with all models.
- Rows of a step with equal numbers of tokens, such as decode rows, are one call of transformers' code. Decoders whose
  code takes no positions (BART) are called for each row. torch computes; one request is several times slower than with
  compiled kernels.
- Only safetensors files with plain weights, one rank (`parallelism.tensor`), a KV cache of at least 16 bits
  (`quantization.kv_cache`), and generation are supported.
- At the start, the logits of a short prompt that is computed in chunks are compared with transformers' own. If they
  differ, or if the code does not work with a cache in pages, complete sequences are computed in each step, as for the
  next kind, and a warning has the reason. The start fails only if the code is not causal.
- Some code keeps other states than keys and values (RWKV, xLSTM, Zamba, DeepSeek-V4), or has no cache (GPT-1). It gets
  the complete sequence in each step, and the pages have the ids of tokens. The time of a token grows with the length of
  the sequence.
- With a rotary scaling that depends on the length of a
  sequence (dynamic, longrope), the context ends at the original length.
- Encoders whose code can be a decoder (BERT, RoBERTa and their relatives) need `is_decoder: true` in `config.json`.
- These architectures of transformers' list of decoders are refused:

| architecture | reason |
|---|---|
REFUSED

## Pooling models

Encoders and bare decoders (`…Model`) return embeddings; `…ForSequenceClassification` and `…ForTokenClassification`
return scores of labels. The other stages of an embedding model are read from sentence-transformers' files:
`modules.json` with Pooling (first token, last token, mean, maximum), Dense and Normalize, the maximum length, and
prompts. A decoder with these files is served for embeddings. `model.task` selects a task that the files do not declare:

| `model.task` | model | returns |
|---|---|---|
| `embed` | an encoder or a decoder | a vector for each text, by `model.pooling` |
| `classify` | a classifier | a score for each label |
| `score` | a classifier with one label, or a decoder | for a decoder: probability of yes over no as the next token |

Encoders, and decoders with bidirectional attention (EmbeddingGemma), have no cache: a prompt is computed in one step,
which must be large enough (`engine.scheduling.max_step_tokens`). Causal decoders use chunked prefill and, if only the
last token is pooled, cached prefixes. With the compiled kernels of a CPU, the numbers of a prompt do not depend on
other prompts, bit for bit; weights may be rounded to 8 or 4 bits and shared among ranks. On a GPU, Triton's fused
kernels compute all prompts of a step together.

## Quantized checkpoints

Quantized weights are never rounded again. The compiled kernels of a CPU multiply the checkpoint's integers directly,
and the Triton kernels of a GPU its integers and fp8 numbers. In all other cases weights are dequantized at load to the
type of the activations; the plan shows the memory that this requires.
[quantization-formats.md](quantization-formats.md) lists how each format was tested, and how it is computed.

| checkpoint | supported | stored as |
|---|---|---|
FORMATS
| `.gguf` files | every type that the package `gguf` dequantizes | see below |

Checkpoints may contain scales for an 8-bit KV cache: as tensors of one number per layer (`k_proj.k_scale` and
`v_proj.v_scale` of ModelOpt, `self_attn.k_scale` and `self_attn.v_scale` of llm-compressor, `attn.k_scale` of vLLM,
`k_proj.output_scale` of AutoFP8, `kv_scale`), or in `kv_cache_scales.json` (AMD Quark), which takes precedence.
`quantization.kv_cache: fp8` applies them; with any other type of cache they are ignored. `auto` is fp8 for such a
checkpoint with Triton kernels, and the format of `kv_cache_scheme` or `kv_cache_quant_algo` in `quantization_config` if
the kernels have it (fp8, int8, int4), but not fp8 with scales for each head. Scales of queries and of attention
probabilities are accepted and not used, because attention is not computed in 8 bits.

- Scales keep the checkpoint's type: float16, bfloat16 or float32.
- Groups have a multiple of 32 inputs, or all inputs of a row. Weights with one scale per output are stored in groups
  of 128 with the same scale.
- On a CPU, activations are rounded to 8 bits in blocks of 32 or 64 inputs, as with all integer weights. On a GPU they
  are not rounded: integers are widened in registers, exactly, and scales multiply the float32 sums of their groups
  (`kernels/integer_matmul.py`). Routers, and experts with act order, are dequantized there.
- With act order, inputs are gathered into the order of the groups. Matrices that are multiplied together (q, k, v;
  gate, up) must have the same order, as they do after one calibration. If only some of them are quantized, or in
  different ways, they are dequantized to float32.
- Projections that are not quantized in the checkpoint keep its type.
- Everything else is refused with its method, bits and reason.

### fp8

Supported is `float8_e4m3fn` with scales per matrix, per output or per block of 128 x 128 (`weight_scale`, or
`weight_scale_inv` as in transformers). With Triton kernels a weight takes one byte, and matrices that are multiplied
together keep their own scales (`engine/weights/fused.py`). The product depends on the GPU and the checkpoint:

| scales | compute capability | activations | product |
|---|---|---|---|
| matrices or outputs | 9.0 to 10.3, `bfloat16` | rounded to fp8, by token or `input_scale` | torch's |
| matrices or outputs | 8.9, 12.0; `float16`; `hardware.batch_invariant` | as above | Triton's |
| blocks | 8.9 and newer | rounded to fp8, by 128 inputs of a token | Triton's, in float32 block by block |
| any | older; checkpoints with unquantized activations | not rounded | Triton's: weights are widened when read |

Norms and activation functions quantize their outputs (`kernels/rms_norm_quantized.py`, `activation_quantized.py`). If
several matrices with separate static scales read the same rows, the largest scale is used for all. The embedding,
norms, routers and the head are never stored in fp8: they are dequantized to the type of the activations. On a CPU and
with torch all fp8 weights are dequantized, exactly, and activations are not rounded, so the same checkpoint gives
slightly different results there. Ranks can split a matrix only between blocks of inputs; other splits are refused, or
dequantized with `hardware.kernels: torch`.

`quantization.weights: fp8` converts a float32, bfloat16 or float16 checkpoint at load on a GPU: one scale per output,
activations rounded token by token, also for routed experts.
Weights in `e5m2` or in blocks of other sizes are dequantized. MXFP8 keeps its bytes with Triton kernels. The `fnuz`
types of older AMD GPUs are refused.

### GGUF

With the compiled kernels of a CPU and the Triton kernels of a GPU, weights of a GGUF file of the types Q2_K to Q6_K,
Q4_0 to Q8_0, IQ4_NL, IQ4_XS and MXFP4 are computed in their own format, with the bytes of the file (on a GPU up to
3.6 % more: [kernels.md](kernels.md#blocks-of-ggml)); so are embeddings, except in Q4_0 and Q8_0. F32, F16 and BF16 are
used as in any checkpoint. Other types are dequantized, or rounded by `quantization.weights`. Ranks can split a matrix
only between blocks of 32 or 256 inputs. Tokenizer, chat template, configuration and end
tokens are read from the file, unless its folder has separate files for them ([sources.md](sources.md#a-gguf-file)).
A file that states a pooling (`pooling_type`: mean, first or last token) embeds, with vectors of length 1 and the
projections after the pooling that the file has (`dense_2`, `dense_3`); files of rerankers are refused.

| `general.architecture` | architecture |
|---|---|
KINDS
A file states less than a config.json. The rest is assumed as llama.cpp does: no windows in Mistral, Mixtral, Qwen 2 and
StarCoder 2 models; the clamp of gpt-oss, the chunks of Llama 4 and the query scale of Gemma as their publishers chose
them. If there is a `config.json` beside the file, its settings are used.

## Add an architecture

Write one file of declarations and add one line to `engine/models/families.py`. A checkpoint folder may also contain its
own: `slipway_model.py` with `ARCHITECTURES` and `declare(config)`, used only with `model.trust_remote_code: true`,
because its code is then executed.

## Add a quantization format

Write one file in `engine/formats` and add one line to `engine/formats/registry.py`. Another Python package can register
a format without a change here, as an entry point of the group `slipway.formats`. `architecture.md` has
[the recipe](architecture.md#a-quantization-format).
"""


def models_page() -> str:
    """Return the page as text."""
    lines = []
    for name in sorted(ARCHITECTURES):
        (family,) = (module for module in FAMILIES if name in module.ARCHITECTURES)
        first = " ".join((inspect.getdoc(family) or "").split("\n\n")[0].split())
        lines.append(f"| `{name}` | {first} | `engine/models/{family.__name__.rpartition('.')[2]}.py` |\n")
    rows = (row for method in BUILT_IN for row in method.table)
    formats = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    kinds = "".join(
        f"| {name} | {', '.join(f'`{one}`' for one in family.architectures)} |\n" for name, family in GGUF.items()
    )
    refused = "".join(f"| `{name}` | {why} |\n" for name, why in REFUSED.items())
    tail = TAIL.replace("FORMATS\n", formats).replace("KINDS\n", f"{kinds}\n").replace("REFUSED\n", refused)
    return HEAD + "".join(lines) + tail


if __name__ == "__main__":
    write_pages(__doc__, {"models.md": models_page})
