"""The step of all parameters of a device in one kernel launch for each combination of formats and dtypes.

The kernel finds its tensors through a table of addresses (:mod:`lowbit.backends.tables`), so the number of tensors and
their shapes compile nothing. Rule, codecs and weight rounding are passed in as the functions that the eager backend
uses. Scalars are read from device memory, where :func:`scalars_kernel` puts them: neither a schedule nor a CUDA graph
needs the host.
"""

from lowbit.dither import PHI, signed32
from lowbit.ops import APPROXIMATE, constexpr, from_bits, jit, tl
from lowbit.tile import step_tile

POINTERS = constexpr(7)  # columns of the table of addresses: parameter, gradient, m, its scale, v, its scale, low bits
RULE_SCALARS = constexpr(8)  # those of rules.scalars, the first columns of the table of scalars
SCALARS = constexpr(12)  # and the step's dither, the parameter's offset, 0.0 for a step that is to be skipped
SHAPE = constexpr(4)  # columns of the table of shapes
HYPER = constexpr(6)  # columns of the table of param groups: lr, betas, eps, weight decay, sign of the gradient
TENSORS = constexpr(128)  # tensors that a program of scalars_kernel serves
STEP_PHI = constexpr(signed32(PHI))
STORE_BYTE = constexpr("st.global.u8 [$1], $2;  mov.b32 $0, 0;")
STORE_WORD = constexpr("st.global.b32 [$1], $2;  mov.b32 $0, 0;")


@jit
def scalars_kernel(
    step_addresses, groups, hyper, grad_scale, found_inf, scalars, count, RULE: constexpr, DECOUPLED: constexpr
):
    """One step on for every tensor: count it, unless ``found_inf`` says to skip, and write its scalars.

    ``hyper`` is float64 ``[groups, 6]``, ``groups`` int32 ``[tensors]``, ``scalars`` fp32 ``[tensors, 12]``.
    """
    i = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    mask = i < tl.load(count)
    steps = tl.load(step_addresses + i, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    live = (tl.load(found_inf) == 0.0).to(tl.float32)  # it is a sum over devices: more than one, too
    step = tl.load(steps, mask=mask, other=1.0) + live
    tl.store(steps, step, mask=mask)
    step = tl.maximum(step, 1.0)  # a first step that is skipped
    row = hyper + tl.load(groups + i, mask=mask, other=0) * HYPER
    lr, beta1, beta2 = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    factor = tl.load(row + 5) / tl.load(grad_scale)
    values = RULE(step.to(tl.float64), lr, beta1, beta2, tl.load(row + 3), tl.load(row + 4), factor, DECOUPLED)
    scalars += i * SCALARS
    for k in tl.static_range(RULE_SCALARS):
        tl.store(scalars + k, values[k].to(tl.float32), mask=mask)
    dither = step.to(tl.int32) * STEP_PHI
    tl.store(scalars + RULE_SCALARS, dither.to(tl.float32, bitcast=True), mask=mask)
    tl.store(scalars + RULE_SCALARS + 2, live + tl.zeros_like(step), mask=mask)


@jit
def pointer_at(address, DTYPE: constexpr, WHOLE: constexpr):
    """The pointer of a table's address; whole chunks are aligned, which makes their loads 128 bits wide.

    A tensor that the format does not have, ``DTYPE`` None, has a pointer that is not followed.
    """
    pointer = address.to(tl.pointer_type(tl.int8 if DTYPE is None else DTYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def read(pointer, DTYPE: constexpr, mask, WHOLE: constexpr):
    """Load, with zeros outside the tensor; 0 for a tensor that the format does not have."""
    if DTYPE is None:
        return 0
    elif WHOLE:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@jit
def write(pointer, value, DTYPE: constexpr, mask, WHOLE: constexpr):
    """Store inside a tensor that the format has."""
    if DTYPE is not None:
        if WHOLE:
            tl.store(pointer, value)
        else:
            tl.store(pointer, value, mask=mask)


@jit
def write_scale(pointer, value, DTYPE: constexpr, mask, WHOLE: constexpr):
    """Store scales ``[blocks, 1]``, which all threads of a block hold.

    Triton would have one thread store each, through shared memory and barriers; on NVIDIA's GPUs all store, which is
    one transaction.
    """
    if DTYPE is None or not (APPROXIMATE and WHOLE):
        write(pointer, value, DTYPE, mask, WHOLE)
    else:
        pointer, word = pointer.to(tl.int64), value.to(tl.int32, bitcast=tl.float32 == DTYPE)
        store: constexpr = STORE_BYTE if tl.uint8 == DTYPE else STORE_WORD
        tl.inline_asm_elementwise(store, "=r,l,r", [pointer, word], tl.int32, is_pure=False, pack=1)


@jit
def fetch_part(address, chunk, lanes, DTYPE: constexpr, UNIT: constexpr, CHUNK: constexpr, THREADS: constexpr):
    """Have the second-level cache fetch a chunk of one tensor, each thread its part."""
    bytes: constexpr = CHUNK * UNIT * DTYPE.primitive_bitwidth // 8
    at = address + chunk.to(tl.int64) * bytes + (lanes * (bytes // THREADS)).to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1];  mov.b32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@jit
def fetch_ahead(
    at, chunk, P: constexpr, G: constexpr, M: constexpr, V: constexpr, LOW: constexpr,
    M_UNIT: constexpr, V_UNIT: constexpr, CHUNK: constexpr, THREADS: constexpr,
):  # fmt: skip
    """Have the second-level cache fetch the chunk of ``CHUNK`` blocks that a later program will step.

    Loads alone keep too few bytes on their way: registers limit how many programs run at a time.
    """
    lanes = tl.arange(0, THREADS)
    fetch_part(at[0], chunk, lanes, P, 32, CHUNK, THREADS)
    fetch_part(at[1], chunk, lanes, G, 32, CHUNK, THREADS)
    fetch_part(at[2], chunk, lanes, M, M_UNIT, CHUNK, THREADS)
    fetch_part(at[4], chunk, lanes, V, V_UNIT, CHUNK, THREADS)
    if LOW is not None:
        fetch_part(at[6], chunk, lanes, LOW, 32, CHUNK, THREADS)


@jit
def locate(shapes, start, BLOCKS: constexpr, WHOLE: constexpr):
    """Where the blocks of a chunk are, from the number of its first block.

    Returns ``(base, block, row, column, width, inside, first)``: the block from which offsets count, each block's
    number from there, the row and the column of its first element, the row's width, whether it is one of the tensor's,
    and the number of its first element in the tensor.
    """
    block = tl.arange(0, BLOCKS)[:, None]
    if WHOLE:
        return start, block, 0, 0, 0, 0, (start * 32).to(tl.int32) + block * 32
    else:
        width, per_row, blocks, stride = row_of(shapes, 0, SHAPE)
        block = block + start
        row, column = block // per_row, block % per_row * 32
        return start * 0, block, row, column, width, block < blocks, (row * stride + column).to(tl.int32)


@jit
def place(UNIT: constexpr, block, row, column, width, inside, WHOLE: constexpr):
    """Offsets ``[blocks, unit]`` from the base of a tensor with ``UNIT`` columns for a block of 32, and their mask."""
    lanes = tl.arange(0, UNIT)[None, :]
    if WHOLE:
        return block * UNIT + lanes, 0
    else:
        columns, lane = (width * UNIT + 31) // 32, column * UNIT // 32 + lanes
        return row * columns + lane, inside & (lane < columns)


@jit
def row_of(table, row, COLUMNS: constexpr):
    """A row of a table as a tuple of scalars."""
    at = table + row * COLUMNS
    values = (tl.load(at),)
    for k in tl.static_range(1, COLUMNS):
        values = values + (tl.load(at + k),)  # noqa: RUF005  Triton knows no star here
    return values


@jit
def low_half(x):
    """The lower 32 bits of an int64."""
    return x.to(tl.int32)


@jit
def high_half(x):
    """The upper 32 bits of an int64."""
    return (x >> 32).to(tl.int32)


@jit
def pointers(
    at, base, block, row, column, width, inside,
    P: constexpr, G: constexpr, M: constexpr, M_SCALE: constexpr, V: constexpr, V_SCALE: constexpr, LOW: constexpr,
    M_UNIT: constexpr, V_UNIT: constexpr, WHOLE: constexpr,
):  # fmt: skip
    """Pointers of a tile in the tensors of a row ``at`` of the table of addresses, and the masks of three widths."""
    offset, mask = place(32, block, row, column, width, inside, WHOLE)
    m_offset, m_mask = place(M_UNIT, block, row, column, width, inside, WHOLE)
    v_offset, v_mask = place(V_UNIT, block, row, column, width, inside, WHOLE)
    p = pointer_at(at[0], P, WHOLE) + base * 32 + offset
    g = pointer_at(at[1], G, WHOLE) + base * 32 + offset
    m = pointer_at(at[2], M, WHOLE) + base * M_UNIT + m_offset
    m_scale = pointer_at(at[3], M_SCALE, False) + base + block
    v = pointer_at(at[4], V, WHOLE) + base * V_UNIT + v_offset
    v_scale = pointer_at(at[5], V_SCALE, False) + base + block
    low = pointer_at(at[6], LOW, WHOLE) + base * 32 + offset
    return p, low, g, m, m_scale, v, v_scale, mask, m_mask, v_mask


@jit
def load_tile(
    to, inside, P: constexpr, G: constexpr, M: constexpr, M_SCALE: constexpr, V: constexpr, V_SCALE: constexpr,
    LOW: constexpr, WHOLE: constexpr,
):  # fmt: skip
    """What :func:`lowbit.tile.step_tile` takes of the tensors."""
    return (
        read(to[0], P, to[7], WHOLE), read(to[1], LOW, to[7], WHOLE), read(to[2], G, to[7], WHOLE),
        read(to[3], M, to[8], WHOLE), read(to[4], M_SCALE, inside, WHOLE),
        read(to[5], V, to[9], WHOLE), read(to[6], V_SCALE, inside, WHOLE),
    )  # fmt: skip


@jit
def store_tile(
    to, inside, p, low, m, m_scale, v, v_scale, P: constexpr, M: constexpr, M_SCALE: constexpr, V: constexpr,
    V_SCALE: constexpr, LOW: constexpr, WHOLE: constexpr,
):  # fmt: skip
    """What :func:`lowbit.tile.step_tile` returns."""
    write(to[0], p, P, to[7], WHOLE)
    write(to[1], low, LOW, to[7], WHOLE)
    write(to[3], m, M, to[8], WHOLE)
    write_scale(to[4], m_scale, M_SCALE, inside, WHOLE)
    write(to[5], v, V, to[9], WHOLE)
    write_scale(to[6], v_scale, V_SCALE, inside, WHOLE)


@jit
def step_kernel(
    chunks, addresses, shapes, scalars,
    RULE: constexpr, M_DECODE: constexpr, M_ENCODE: constexpr, V_DECODE: constexpr, V_ENCODE: constexpr,
    W_DECODE: constexpr, W_ENCODE: constexpr, P: constexpr, G: constexpr, M: constexpr, M_SCALE: constexpr,
    V: constexpr, V_SCALE: constexpr, LOW: constexpr, M_UNIT: constexpr, V_UNIT: constexpr,
    BLOCKS: constexpr, TILES: constexpr, SPLIT: constexpr, WHOLE: constexpr, AHEAD: constexpr,
):  # fmt: skip
    """One chunk, ``TILES`` tiles of ``BLOCKS`` blocks of 32 elements, one step on.

    ``chunks`` int64 ``[·, 2]`` says which tensor, which of its chunks is the first of ``SPLIT`` programs (upper half),
    how many there are, and how many chunks the tensor has (upper half). Whole chunks are consecutive in memory and need
    no mask; else a row of ``width`` elements is cut into blocks of its own, and ``shapes`` int64 ``[tensors, 4]`` holds
    ``width``, blocks a row, all blocks, and how many element numbers lie between the starts of two rows.
    ``scalars`` are read as int64 ``[tensors, 6]``, two at a time. A tile is loaded before the one in front of it is
    stored: while a program computes, its loads are on their way, and the chunk ``AHEAD`` chunks on is fetched.
    """
    entry, k = chunks + tl.program_id(0) // SPLIT * 2, tl.program_id(0) % SPLIT
    which, count = tl.load(entry), tl.load(entry + 1)
    if k < low_half(count):
        tensor = low_half(which)
        a, b, c, d, e, f = row_of(scalars, tensor, SCALARS // 2)
        if low_half(f) != 0:
            at = row_of(addresses, tensor, POINTERS)
            start = (high_half(which) + k).to(tl.int64) * (TILES * BLOCKS)
            base, block, row, column, width, inside, first = locate(shapes + tensor * SHAPE, start, BLOCKS, WHOLE)
            to = pointers(
                at, base, block, row, column, width, inside,
                P, G, M, M_SCALE, V, V_SCALE, LOW, M_UNIT, V_UNIT, WHOLE,
            )  # fmt: skip
            tile = load_tile(to, inside, P, G, M, M_SCALE, V, V_SCALE, LOW, WHOLE)
            next_to, next_tile = to, tile
            for i in tl.static_range(TILES):
                if i + 1 < TILES:
                    next_to = pointers(
                        at, base + (i + 1) * BLOCKS, block, row, column, width, inside,
                        P, G, M, M_SCALE, V, V_SCALE, LOW, M_UNIT, V_UNIT, WHOLE,
                    )  # fmt: skip
                    next_tile = load_tile(next_to, inside, P, G, M, M_SCALE, V, V_SCALE, LOW, WHOLE)
                if AHEAD > 0 and i == 0:
                    soon = tl.minimum(high_half(which) + k + AHEAD, high_half(count) - 1)
                    fetch_ahead(at, soon, P, G, M, V, LOW, M_UNIT, V_UNIT, TILES * BLOCKS, BLOCKS * 4)
                p, low, m, m_scale, v, v_scale = step_tile(
                    tile[0], tile[1], tile[2], tile[3], tile[4], tile[5], tile[6],
                    first + (high_half(e) + i * BLOCKS * 32), tl.arange(0, 32)[None, :], low_half(e),
                    from_bits(low_half(a)), from_bits(high_half(a)), from_bits(low_half(b)), from_bits(high_half(b)),
                    from_bits(low_half(c)), from_bits(high_half(c)), from_bits(low_half(d)), from_bits(high_half(d)),
                    RULE, M_DECODE, M_ENCODE, V_DECODE, V_ENCODE, W_DECODE, W_ENCODE,
                )  # fmt: skip
                store_tile(to, inside, p, low, m, m_scale, v, v_scale, P, M, M_SCALE, V, V_SCALE, LOW, WHOLE)
                to, tile = next_to, next_tile
