"""Features of whole slides by a LongNet encoder with torchscale's parameters, as prov-gigapath's slide encoder has
them.

    python examples/slide_features.py [--tiles 6000] [--layers 12]

Two slides of different numbers of tiles, padded to one batch, on a CPU and without flash-attn. The sizes are those
of prov-gigapath's encoder: 12 layers of 768, segments of 1,024 to 1,048,576 tiles at rates 1 to 16. Weights are
random here; load a checkpoint's by `encoder.load_state_dict`. Printed: seconds a batch, and how far the shorter
slide's features are from those it has alone, for the numbers that torchscale computes and for the exact pattern.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import torch
from torch import Tensor

from attn_dispatch.nn.torchscale import LongNetEncoder

WIDTH, HEADS, FEED_FORWARD = 768, 16, 3072


def settings(layers: int) -> SimpleNamespace:
    """The settings of torchscale's EncoderConfig that the encoder reads."""
    return SimpleNamespace(
        encoder_embed_dim=WIDTH,
        encoder_attention_heads=HEADS,
        encoder_ffn_embed_dim=FEED_FORWARD,
        encoder_layers=layers,
        encoder_normalize_before=True,
        normalize_output=True,
        activation_fn="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        drop_path_rate=0.0,
        subln=True,
        no_scale_embedding=True,
        no_output_layer=True,
        vocab_size=0,
        layernorm_eps=1e-5,
        segment_length=[1024, 5792, 32768, 185363, 1048576],
        dilated_ratio=[1, 2, 4, 8, 16],
        max_rel_pos=0,
    )


def features(encoder: LongNetEncoder, tiles: Tensor, padding: Tensor | None) -> Tensor:
    """The mean over a slide's tiles, [batch, WIDTH], for embedded tiles [batch, tiles, WIDTH]."""
    out = encoder(token_embeddings=tiles, encoder_padding_mask=padding)["encoder_out"]
    if padding is None:
        return out.mean(1)
    kept = ~padding[..., None]
    return (out * kept).sum(1) / kept.sum(1)


@torch.inference_mode()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tiles", type=int, default=6000, help="of the longer slide; the other one has two thirds")
    options.add_argument("--layers", type=int, default=12)
    given = options.parse_args()
    torch.manual_seed(0)
    short = given.tiles * 2 // 3
    tiles = torch.randn(2, given.tiles, WIDTH)
    padding = torch.arange(given.tiles) >= torch.tensor([given.tiles, short])[:, None]
    weights = LongNetEncoder(settings(given.layers)).state_dict()
    for like_torchscale in (True, False):
        encoder = LongNetEncoder(settings(given.layers), like_torchscale=like_torchscale).eval()
        encoder.load_state_dict(weights)
        features(encoder, tiles, padding)  # the first call chooses how attention runs
        start = time.perf_counter()
        both = features(encoder, tiles, padding)
        seconds = time.perf_counter() - start
        alone = features(encoder, tiles[1:, :short], None)
        apart = (both[1] - alone[0]).norm() / alone.norm()
        title = "torchscale's numbers" if like_torchscale else "exact pattern"
        print(f"{title:20} {seconds:.1f} s for {given.tiles:,} and {short:,} tiles; padding changes {apart:.1e} of the "
              f"shorter one's features", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
