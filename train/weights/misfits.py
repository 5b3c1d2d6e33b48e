"""Why weights do not fit a model, and what to do: pure functions of names and shapes."""

from collections.abc import Mapping, Sequence

from train.weights.fitting import Change, Shape

_CONV = "video.conv1.weight"
# Of a captioner alone: its decoder, and what brings the tower's tokens to the decoder's width.
_TOKENS, _OF_CAPTIONS = "decoder.token_embedding.weight", ("decoder.", "projection.")
# Parts that a model may have and its weights lack, or the other way round, and that can be learned anew.
_PARTS = ("decoder.", "video.ln_post.", "fc_norm.", "head.")
_ANYHOW = "use the --model (and --input) that the weights are of, or name what may differ: --init.allow PATTERN"


def architecture_of(shapes: Mapping[str, Shape]) -> str:
    """Width, depth and patch, as far as the names and shapes tell."""
    parts = []
    for tower in ("video", "text", "decoder"):
        gains = [shape for name, shape in shapes.items() if name.startswith(tower) and name.endswith("ln_1.weight")]
        if depth := _depth(shapes, tower):
            parts.append(f"{tower} of width {gains[0][0] if gains else '?'} and {depth} blocks")
    if conv := shapes.get(_CONV):
        parts.append(f"patches of {' x '.join(map(str, conv[1:]))}")
    return ", ".join(parts) or "no towers"


def hint_about(unexplained: Sequence[Change], *, there: Mapping[str, Shape], here: Mapping[str, Shape]) -> str:
    """What the user can do about changes that nothing explains, given the shapes of the weights and of the model."""
    if _CONV in there and _CONV in here and there[_CONV][1] != here[_CONV][1]:
        return (
            f"the weights see {there[_CONV][1]} channels, the model {here[_CONV][1]} (pixels have 3, latents others): "
            "use the --input that the weights are of"
        )
    cubes = [_cube_frames(shapes) for shapes in (there, here)]
    if cubes[0] != cubes[1] and {change.name for change in unexplained} == {_CONV}:
        return f"use --towers.tubelet {cubes[0]}, the frames of a cube that the weights are of"
    if _TOKENS in there and _TOKENS in here and all(change.name.startswith(_OF_CAPTIONS) for change in unexplained):
        num_tokens, width = there[_TOKENS]
        context, depth = there.get("decoder.positional_embedding", ("?",))[0], _depth(there, "decoder")
        return (
            f"use --decoder.width {width} --decoder.depth {depth} --decoder.max-tokens {context}, and as "
            f"--decoder.tokenizer the one of {num_tokens:,} tokens that the weights were trained with"
        )
    depths = [_depth(shapes, "decoder") for shapes in (there, here)]
    if all(depths) and depths[0] != depths[1]:
        return f"use --decoder-depth {depths[0]}, which the weights are of"
    parts = {next((part for part in _PARTS if change.name.startswith(part)), "") for change in unexplained}
    if "" not in parts and not all(depths):
        patterns = " ".join(f"'{part}*'" for part in sorted(parts))
        return f"these are parts for another purpose: to go on without them, --init.allow {patterns}"
    return _ANYHOW


def _cube_frames(shapes: Mapping[str, Shape]) -> int:
    conv = shapes.get(_CONV, ())
    return conv[2] if len(conv) == 5 else 1


def _depth(shapes: Mapping[str, Shape], tower: str) -> int:
    return len({name.split(".")[3] for name in shapes if name.startswith(f"{tower}.transformer.resblocks.")})
