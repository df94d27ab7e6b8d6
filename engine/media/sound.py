"""Videos with their sound (Qwen2.5-Omni): pieces of the video and of its sound alternate in the prompt.

A piece covers `seconds_per_chunk` and is a separate item for the engine. Frames do not attend to one another, and
chunks of sound do not either, so division does not change embeddings. Source: transformers processing_qwen2_5_omni.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest

import numpy as np

from engine.api.media import INTERLEAVED, MediaTensor, Modality
from engine.media.clip import Array
from engine.media.processed import MediaError, Processed, ProcessedPart
from engine.media.processor import AudioProcessor, VideoProcessor, digest_of, media_tensor
from engine.media.settings import Files

Piece = tuple[ProcessedPart, int]
"""An item and the number of its tokens."""
FRAMES = 4  # frames of a spectrogram for each token
OPTION = "use_audio_in_video"


@dataclass(frozen=True)
class Sound:
    """Division of a video and its sound into pieces."""

    audio: AudioProcessor
    placeholder: str
    """Token of the video."""
    around: tuple[str, str]
    """Texts before the first piece and after the last one."""
    rate: float
    """Positions of a second."""
    size: int
    """Positions of a piece."""

    def joined(self, video: Processed, samples: Array) -> Processed:
        """Return a video with its sound, mono samples at 16 kHz; the video alone if they are too few for a token.
        Raises MediaError."""
        count = self._count(len(samples))
        if not count:
            return video
        tensors = {name: _array(tensor) for name, tensor in video.tensors.items()}
        ((frames, high, wide),), (seconds,) = (
            tensors[name].tolist() for name in ("video_grid_thw", "second_per_grid_ts")
        )
        times = np.arange(frames) * seconds * self.rate
        if frames > 1 and times[1] > self.size:
            raise MediaError(
                f"{OPTION} needs a pair of frames in each {self.size / self.rate:g} s, and the video has one in each "
                f"{seconds:.3g} s; send a shorter video, or raise fps or the server's limits.media.frames"
            )
        each, seen, heard = video.runs[0] // frames, list[Piece](), list[Piece]()
        for first, end in chunks(times, self.size):
            made = {
                "pixel_values_videos": tensors["pixel_values_videos"][first * high * wide : end * high * wide],
                "video_grid_thw": np.array([[end - first, high, wide]], np.int64),
                "second_per_grid_ts": tensors["second_per_grid_ts"],
                INTERLEAVED: np.array([first], np.int64),
            }
            seen.append((_part("video", made), (end - first) * each))
        whole = self.audio.tensors(samples)
        for first, end in chunks(np.arange(count), self.size):
            own = slice(first * FRAMES, end * FRAMES)
            last = end == count
            made = {name: one[..., own.start : None if last else own.stop] for name, one in whole.items()}
            heard.append((_part("audio", {**made, INTERLEAVED: np.array([first], np.int64)}), end - first))
        pieces = [one for both in zip_longest(seen, heard) for one in both if one is not None]
        names = {"video": self.placeholder, "audio": self.audio.tokens.image}
        text = "".join(names[part.modality] for part, _ in pieces)
        digest = sha256(b"".join(part.digest for part, _ in pieces)).digest()
        return Processed(
            digest,
            f"{self.around[0]}{text}{self.around[1]}",
            tuple(count for _, count in pieces),
            {},
            "video",
            "video",
            parts=tuple(part for part, _ in pieces),
        )

    def _count(self, samples: int) -> int:
        """Return the number of tokens of a sound, 0 if it is shorter than a token."""
        try:
            return self.audio.layout(samples).count
        except MediaError:
            return 0


def _array(tensor: MediaTensor) -> Array:
    return np.frombuffer(tensor.data, "<f4" if tensor.dtype == "float32" else "<i8").reshape(tensor.shape)


def chunks(times: Array, size: int) -> list[tuple[int, int]]:
    """Return the first and the last number, exclusive, of the positions of each piece. times: ascending."""
    found, begin = list[tuple[int, int]](), 0
    for at, time in enumerate(times):
        if time >= (len(found) + 1) * size:
            found.append((begin, at))
            begin = at
    return [*found, (begin, len(times))]


def _part(modality: Modality, arrays: Mapping[str, Array]) -> ProcessedPart:
    tensors = {name: media_tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return ProcessedPart(modality, digest_of(tensors), tensors)


def declare(files: Files, video: VideoProcessor, audio: AudioProcessor) -> Sound:
    """Raises ValueError for a model or settings that do not permit the division."""
    if not files.is_omni or files.is_qwen3_omni:
        raise ValueError(f"{OPTION} is supported for Qwen2.5-Omni")
    thinker = files.config.get("thinker_config")
    config = thinker if isinstance(thinker, Mapping) else files.config
    rate, seconds = float(config.get("position_id_per_seconds") or 25), float(config.get("seconds_per_chunk") or 2)
    size, window = int(rate * seconds), 2 * int(files.hearing.get("n_window") or 100)
    if size < 1 or size * FRAMES % window:
        raise ValueError(
            f"{OPTION} needs pieces of whole chunks; {seconds:g} s have {size * FRAMES} frames, a chunk has {window}"
        )
    around = files.token("audio_bos_token", "<|audio_bos|>"), files.token("audio_eos_token", "<|audio_eos|>")
    return Sound(audio, video.tokens.image, around, rate, size)
