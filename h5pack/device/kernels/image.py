"""The Triton kernel that writes images moved, colored, normalized and erased. Importing this module requires Triton.

A thread computes one vector (16 bytes of the result) at a time, always in the same columns of every n-th line of an
image. So everything that depends on the column is computed once: the offset in the source, the channel's constants, and
whether the column is in the erased box. Everything that depends on the line is the same for all values of a vector. If
a line does not begin and end at multiples of 16 bytes, separate programs compute the few values at the line's ends, and
store them one by one.

Pixels are loaded without masks, because a mask would take an instruction for each pixel. For positions outside the
image, the last row or column of the image is read instead, and the value is then replaced.

Flips and windows only change the offsets from which pixels are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from h5pack.device.augment import DRAW_ROWS

# The row of each draw in `AugmentationDraws.geometry`, in the order of `DRAW_ROWS`.
_FLIP, _VERTICAL_FLIP, _TOP, _LEFT, _BOX_TOP, _BOX_LEFT, _BOX_HEIGHT, _BOX_WIDTH, _HEIGHT, _WIDTH = (
    tl.constexpr(row) for row in range(len(DRAW_ROWS))
)


@triton.jit  # type: ignore[untyped-decorator]
def _load_constants(constants, CHANNELS: tl.constexpr, FINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return center, coarse, fine and bias of the channels to which `constants` points."""
    bias = tl.load(constants + 3 * CHANNELS)
    fine = bias
    if FINE:
        fine = tl.load(constants + 2 * CHANNELS)
    return tl.load(constants), tl.load(constants + CHANNELS), fine, bias


@triton.jit  # type: ignore[untyped-decorator]
def _interleaved(column, spot, CHANNELS: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pixel and channel of each value of a vector that begins at `column`, and the channel of its first value.

    This takes one division per vector, because the compiler knows each `spot` (the index of a value in the vector).
    """
    pixel = (column + CHANNELS * VALUES) // CHANNELS - VALUES
    first = column - pixel * CHANNELS
    channel = first + spot % CHANNELS
    is_later = channel >= CHANNELS
    pixel = pixel + spot // CHANNELS + tl.where(is_later, 1, 0)
    return pixel, tl.where(is_later, channel - CHANNELS, channel), first


@triton.jit  # type: ignore[untyped-decorator]
def _constants_of(  # type: ignore[no-untyped-def]
    constants, first, spot, CHANNELS: tl.constexpr, PLANAR: tl.constexpr, FINE: tl.constexpr
):
    """Return center, coarse, fine and bias for each value of a vector. Its first value belongs to the channel `first`.

    With PLANAR, so do all other values. Otherwise, the constants of each channel are loaded once. The compiler knows
    each `spot`, so it evaluates `is_later`, and no `tl.where` on it is left at run time.
    """
    center, coarse, fine, bias = _load_constants(constants + first, CHANNELS, FINE)
    for later in tl.static_range(1, 1 if PLANAR else CHANNELS):
        channel = first + later
        channel = tl.where(channel < CHANNELS, channel, channel - CHANNELS)
        next_center, next_coarse, next_fine, next_bias = _load_constants(constants + channel, CHANNELS, FINE)
        is_later = spot % CHANNELS == later
        center, coarse = tl.where(is_later, next_center, center), tl.where(is_later, next_coarse, coarse)
        fine, bias = tl.where(is_later, next_fine, fine), tl.where(is_later, next_bias, bias)
    return center, coarse, fine, bias


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(raw, center, coarse, fine, bias, FINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (raw / 255 - mean) / std in float32; `raw` is int32. See `h5pack.device.normalize`."""
    # 0x4B000000 is the float 2^23; with the bits of raw, it is the float 2^23 + raw. Subtracting from that is exact and
    # takes a quarter of the time of converting an integer to a float.
    steps = (raw | 0x4B000000).to(tl.float32, bitcast=True) - (center + 8388608.0)
    small = bias
    if FINE:
        small = steps * fine + bias
    return steps * coarse + small


@triton.jit  # type: ignore[untyped-decorator]
def _blackened(is_black, center, coarse, fine, bias, FINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return coarse, fine and bias. In black columns, they turn any loaded value into the result of a black pixel.

    This saves an instruction per value in the loop over lines.
    """
    black = _scaled(tl.full((), 0, tl.int32), center, coarse, fine, bias, FINE)
    return tl.where(is_black, 0.0, coarse), tl.where(is_black, 0.0, fine), tl.where(is_black, black, bias)


@triton.jit
def _load_row(colors, samples):  # type: ignore[no-untyped-def]
    """Load one row (four numbers) of each color matrix. Add 2^15 to the last number, so that a shift by 16 rounds."""
    added = tl.load(colors + 3 * samples) + 32768
    return tl.load(colors), tl.load(colors + samples), tl.load(colors + 2 * samples), added


@triton.jit
def _outside(positions, size):  # type: ignore[no-untyped-def]
    """Return -1 (all bits set) for positions outside 0..size-1, else 0.

    Unlike booleans, these integers stay in registers during a loop, and one instruction can apply two of them as masks.
    """
    return (positions | (size - 1 - positions)) >> 31


@triton.jit
def _inside(positions, size):  # type: ignore[no-untyped-def]
    """Return positions as uint32. Positions outside 0..size-1 become size-1, so that every load is inside the image."""
    return tl.minimum(positions.to(tl.uint32, bitcast=True), (size - 1).to(tl.uint32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    x, y, advance, draws, samples, width, lines, width_out, stride_x,
    MOVES: tl.constexpr, PADDED: tl.constexpr, ERASES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return where the pixels (x, y) of the result lie in the source and relative to the erased box.

    - Source: the offset within a row, the row, the step to the row of the thread's next line (negative if the image is
      flipped vertically), and a bit mask for the loaded pixels.
    - Erased box: the row in the box, the height of the box, and a bit mask for values in rows of the box.
    """
    box_row, box_height, box_bits = y, lines, x
    if ERASES:
        box_row = y - tl.load(draws + _BOX_TOP * samples)
        box_height = tl.load(draws + _BOX_HEIGHT * samples)
        box_bits = _outside(x - tl.load(draws + _BOX_LEFT * samples), tl.load(draws + _BOX_WIDTH * samples))
    row, step = y, advance
    if MOVES:
        is_upside_down = tl.load(draws + _VERTICAL_FLIP * samples) != 0
        step = tl.where(is_upside_down, -advance, advance)
        row = tl.where(is_upside_down, lines - 1 - y, y) + tl.load(draws + _TOP * samples)
        x = tl.where(tl.load(draws + _FLIP * samples) != 0, width_out - 1 - x, x) + tl.load(draws + _LEFT * samples)
    # Outside the image, pixels are 0, which is the black padding of the crop.
    pixel_bits = 255
    if PADDED:
        pixel_bits = 255 & ~_outside(x, width)
    column = _inside(x, width)
    return (column.to(tl.int64) if WIDE else column) * stride_x, row, step, pixel_bits, box_row, box_height, box_bits


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    y, column, place, known, advance, part, pixels, result, constants, draws, colors, samples,
    height, width, lines, length, stride_image, stride_y, stride_x, stride_channel,
    CHANNELS: tl.constexpr, PLANES: tl.constexpr, MOVES: tl.constexpr, PADDED: tl.constexpr, ERASES: tl.constexpr,
    COLORS: tl.constexpr, FINE: tl.constexpr, WIDE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute vectors of the lines y, y + advance, ... of a part (see `image_kernel`).

    `y`, `column` and `place` have the shape (A, 1): one number for each of A vectors. `column` is the column of the
    vector's first value, negative if the vector begins before the line. `place` is where this value is stored in line
    y: an offset from the last multiple of VALUES at or before the start of the part. `known`, (A, 1) or (A, VALUES),
    says which values to store.
    """
    image = part
    plane = 0
    if PLANES == 1:
        image = part // CHANNELS
        plane = (part - image * CHANNELS).to(tl.int32)
    spot = tl.arange(0, VALUES)[None, :]
    places = place + spot
    x, channel, first = column + spot, plane, plane
    if PLANES == 0:
        x, channel, first = _interleaved(column, spot, CHANNELS, VALUES)
    offset, row, step, pixel_bits, box_row, box_height, box_bits = _place(
        x, y, advance, draws + image, samples, width, lines, length // CHANNELS if PLANES == 0 else length, stride_x,
        MOVES, PADDED, ERASES, WIDE,
    )  # fmt: skip
    size = (lines.to(tl.int64) if WIDE else lines) * length
    center, coarse, fine, bias = _constants_of(constants, first, spot, CHANNELS, PLANES > 0, FINE)
    if PADDED and (PLANES <= 1 and not COLORS):  # Triton 3.0 refuses a chain without parentheses.
        coarse, fine, bias = _blackened(pixel_bits == 0, center, coarse, fine, bias, FINE)
        pixel_bits = 255
    if COLORS:
        of_red, of_green, of_blue, added = _load_row(colors + image + 4 * channel * samples, samples)
    else:
        offset += channel * stride_channel
    of_pixels = pixels + image * stride_image
    left = tl.where(known, lines - y, 0)
    start = part * size * (PLANES if PLANES > 1 else 1) // VALUES
    turn = advance.to(tl.int64) * length // VALUES
    for done in range(0, lines, advance):
        there = _inside(row, height)
        bits = pixel_bits
        if PADDED:
            bits = pixel_bits & tl.where(row.to(tl.uint32, bitcast=True) == there, 255, 0)
        # This order of additions computes the address of the line once, and needs one register per column, not two.
        source = (of_pixels + (there.to(tl.int64) if WIDE else there) * stride_y) + offset
        if COLORS:
            red = tl.load(source).to(tl.int32) & bits
            green = tl.load(source + stride_channel).to(tl.int32) & bits
            blue = tl.load(source + 2 * stride_channel).to(tl.int32) & bits
        if ERASES:
            in_box = box_row.to(tl.uint32, bitcast=True) < box_height.to(tl.uint32, bitcast=True)
            # The compiler does not know that `box_height >> 31` is 0. For a plain 0, it would test `in_box` per value.
            kept = box_bits | tl.where(in_box, box_height >> 31, -1)
        for other in tl.static_range(1 if PLANES <= 1 else PLANES):
            if PLANES > 1:
                center, coarse, fine, bias = _load_constants(constants + other, CHANNELS, FINE)
            if COLORS:
                if PLANES > 1:
                    of_red, of_green, of_blue, added = _load_row(colors + image + 4 * other * samples, samples)
                mixed = (of_red * red + of_green * green + of_blue * blue + added) >> 16
                raw = tl.minimum(tl.maximum(mixed, 0), 255)
            else:
                raw = tl.load(source + other * stride_channel).to(tl.int32) & bits
            values = _scaled(raw, center, coarse, fine, bias, FINE)
            if ERASES:
                values = (values.to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
            # The hint lets a thread store 16 bytes with one instruction.
            plane_start = tl.multiple_of(start * VALUES + other * size, VALUES) if other else start * VALUES
            tl.store(result + plane_start + places, values.to(result.dtype.element_ty), mask=done < left)
        row += step
        box_row += advance
        start += turn


# Do not compile the kernel again if the values or the alignment of these arguments change between batches.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "pixels", "draws", "colors", "samples", "height", "width", "lines", "length", "blocks", "period", "parts",
    ]
)  # fmt: skip
def image_kernel(  # type: ignore[no-untyped-def]
    pixels, result, constants, draws, colors, samples,
    height, width, lines, length, stride_image, stride_y, stride_x, stride_channel, blocks, period, parts,
    CHANNELS: tl.constexpr, PLANES: tl.constexpr, MOVES: tl.constexpr, PADDED: tl.constexpr, ERASES: tl.constexpr,
    COLORS: tl.constexpr, FINE: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, VECTORS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Write some vectors of one part of the result. PLANES says what a part is and what its lines are.

    - 0: A part is an image, and a line holds all channels of its pixels.
    - 1: A part is a single plane (a channel of an image), and a line is a row of this plane.
    - More: A part is an image with this many planes. A program computes the same lines in all planes.
    """
    block = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64) + tl.program_id(2).to(tl.int64) * tl.num_programs(1)
    if part >= parts:
        return
    # Number of values from the last multiple of 16 bytes in the result to the start of the part.
    shift = 0
    if not WHOLE:
        size = lines.to(tl.int64) * length
        shift = ((part * size) % VALUES).to(tl.int32)
    if WHOLE or block < blocks:
        # Whole vectors. A thread computes every `period`-th line: vectors begin at the same columns in all these lines.
        vector = block * VECTORS + tl.arange(0, VECTORS)
        per_line = tl.maximum(length // VALUES, 1)
        y = vector // per_line
        place = ((y * length + shift + VALUES - 1) // VALUES + (vector - y * per_line)) * VALUES
        column = place - y * length - shift
        known = (y < period) & (column + VALUES <= length)
        _copy_rows(
            y[:, None], column[:, None], place[:, None], known[:, None], period, part, pixels, result, constants, draws,
            colors, samples, height, width, lines, length, stride_image, stride_y, stride_x, stride_channel, CHANNELS,
            PLANES, MOVES, PADDED, ERASES, COLORS, FINE, WIDE, VALUES,
        )  # fmt: skip
    else:
        # The rest of each line: fewer than VALUES values at its beginning, and fewer at its end. Each of these two
        # groups is part of one vector.
        y = tl.arange(0, VECTORS) // 2
        is_end = tl.arange(0, VECTORS) % 2 == 1
        head = tl.minimum((VALUES - (y * length + shift) % VALUES) % VALUES, length)
        tail = (length - head) % VALUES
        column = tl.where(is_end, length - tail, head - VALUES)
        spot = tl.arange(0, VALUES)[None, :]
        is_rest = tl.where(is_end[:, None], spot < tail[:, None], spot >= VALUES - head[:, None])
        _copy_rows(
            y[:, None], column[:, None], (y * length + shift + column)[:, None], is_rest,
            tl.full((), VECTORS // 2, tl.int32), part, pixels, result, constants, draws, colors, samples, height, width,
            lines, length, stride_image, stride_y, stride_x, stride_channel, CHANNELS, PLANES, MOVES, PADDED, ERASES,
            COLORS, FINE, WIDE, VALUES,
        )  # fmt: skip
