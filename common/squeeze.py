"""zstd for short streams: no magic number, no content size, contexts kept per thread. Used by ``coding`` and ``sparse``."""

from __future__ import annotations

import threading

import zstandard
from temper.common.errors import ProtocolError

LEVEL = 1
PAYS = 0.97  # a compressed stream is kept when it is smaller than this share of the plain one

_contexts = threading.local()


def squeeze(data: bytes) -> bytes | None:
    """`data` compressed; None where that does not pay."""
    if not hasattr(_contexts, "compressor"):
        parameters = zstandard.ZstdCompressionParameters.from_level(
            LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
        )
        _contexts.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    packed: bytes = _contexts.compressor.compress(data)
    return packed if len(packed) < PAYS * len(data) else None


def unsqueeze(packed: bytes | memoryview, size: int) -> bytes:
    """The `size` bytes that `packed` stands for; ProtocolError if it is damaged or stands for another number of bytes.

    Never allocates more than `size`.
    """
    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    try:
        data: bytes = _contexts.decompressor.decompress(packed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"damaged stream: {error}") from error
    if len(data) != size:
        raise ProtocolError(f"a stream of {len(data)} bytes, expected {size}")
    return data
