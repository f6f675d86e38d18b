"""The step of all parameters of a device in one kernel launch for each combination of formats and dtypes.

The kernel finds its tensors through a table of addresses (:mod:`lowbit.backends.tables`), so the number of tensors and
their shapes compile nothing. Rule, codecs and weight rounding are passed in as the functions that the eager backend
uses. Scalars are read from device memory, where :func:`scalars_kernel` puts them: neither a schedule nor a CUDA graph
needs the host.
"""

from lowbit.ops import constexpr, jit, tl
from lowbit.tile import step_tile

POINTERS = 7  # columns of the address table: parameter, gradient, m, m's scale, v, v's scale, low bits of the weight
SCALARS = 9  # columns of the table of scalars: gradient factor and the eight of rules.scalars
HYPER = 6  # columns of the table of param groups: lr, betas, eps, weight decay, sign of the gradient
LANES = 128  # tensors that a program of scalars_kernel serves


@jit
def scalars_kernel(
    step_addresses, groups, hyper, grad_scale, found_inf, scalars, dithers, count, RULE: constexpr,
    DECOUPLED: constexpr, PHI: constexpr, COLUMNS: constexpr, HYPER_COLUMNS: constexpr, N: constexpr,
):  # fmt: skip
    """One step on for every tensor: count it, unless ``found_inf`` says to skip, and write its scalars.

    ``hyper`` is float64 ``[groups, 6]``, ``groups`` and ``dithers`` int32 ``[tensors]``, ``scalars`` fp32
    ``[tensors, 9]``.
    """
    i = tl.program_id(0) * N + tl.arange(0, N)
    mask = i < tl.load(count)
    steps = tl.load(step_addresses + i, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(steps, mask=mask, other=1.0) + (1.0 - tl.load(found_inf))
    tl.store(steps, step, mask=mask)
    step = tl.maximum(step, 1.0)  # a first step that is skipped
    row = hyper + tl.load(groups + i, mask=mask, other=0) * HYPER_COLUMNS
    lr, beta1, beta2 = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    values = RULE(step.to(tl.float64), lr, beta1, beta2, tl.load(row + 3), tl.load(row + 4), DECOUPLED)
    out = scalars + i * COLUMNS
    tl.store(out, (tl.load(row + 5) / tl.load(grad_scale)).to(tl.float32), mask=mask)
    for k in tl.static_range(8):
        tl.store(out + 1 + k, values[k].to(tl.float32), mask=mask)
    tl.store(dithers + i, step.to(tl.int32) * PHI, mask=mask)


@jit
def at(address, DTYPE: constexpr, WHOLE: constexpr):
    """The pointer at a table's address; whole chunks are aligned, which makes their loads 128 bits wide."""
    pointer = tl.load(address).to(tl.pointer_type(DTYPE))
    if WHOLE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def read(pointer, mask, WHOLE: constexpr):
    """Load, with zeros outside the tensor."""
    if WHOLE:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@jit
def write(pointer, value, mask, WHOLE: constexpr):
    """Store inside the tensor."""
    if WHOLE:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=mask)


@jit
def code_place(UNIT: constexpr, block, row, column, width, inside, BLOCKS: constexpr, WHOLE: constexpr):
    """Offsets ``[blocks, unit]`` of codes from the chunk's first (whole) or the tensor's, and their mask."""
    lanes = tl.arange(0, UNIT)[None, :]
    if WHOLE:
        return tl.arange(0, BLOCKS)[:, None] * UNIT + lanes, 0
    else:
        columns = (width * UNIT + 31) // 32
        place = row * columns + column * UNIT + lanes
        return place, inside & (column * UNIT + lanes < columns)


@jit
def step_kernel(
    addresses, shapes, chunks, scalars, dithers, offsets, found_inf,
    RULE: constexpr, M_DECODE: constexpr, M_ENCODE: constexpr, V_DECODE: constexpr, V_ENCODE: constexpr,
    W_DECODE: constexpr, W_ENCODE: constexpr, P: constexpr, G: constexpr, M: constexpr, M_SCALE: constexpr,
    V: constexpr, V_SCALE: constexpr, LOW: constexpr, M_UNIT: constexpr, V_UNIT: constexpr,
    BLOCKS: constexpr, SPLIT: constexpr, WHOLE: constexpr,
):  # fmt: skip
    """One chunk of ``BLOCKS`` blocks of 32 elements one step on.

    ``chunks`` int32 ``[·, 3]`` says which tensor, which of its chunks is the first of ``SPLIT`` programs, and how
    many there are. Whole chunks are consecutive in memory and need no mask; else a row of ``width`` elements is cut
    into blocks of its own, and ``shapes`` int64 ``[tensors, 3]`` holds ``width``, blocks a row, and all blocks.
    """
    k = tl.program_id(0) % SPLIT
    entry = chunks + tl.program_id(0) // SPLIT * 3
    if (k < tl.load(entry + 2)) & (tl.load(found_inf) == 0.0):
        tensor = tl.load(entry)
        start = (tl.load(entry + 1) + k).to(tl.int64) * BLOCKS
        at_tensor = addresses + tensor * 7
        block = tl.arange(0, BLOCKS)[:, None]
        lanes = tl.arange(0, 32)[None, :]
        if WHOLE:
            row, column, width, inside, base = 0, 0, 0, 0, start
            first = (start * 32).to(tl.int32) + block * 32
            place, mask = block * 32 + lanes, 0
        else:
            at_shape = shapes + tensor * 3
            width, per_row = tl.load(at_shape), tl.load(at_shape + 1)
            block = block + start
            row, column, inside, base = block // per_row, block % per_row, block < tl.load(at_shape + 2), start * 0
            place = row * width + column * 32
            first = place.to(tl.int32)
            place, mask = place + lanes, inside & (column * 32 + lanes < width)
        first += tl.load(offsets + tensor)
        m_place, m_mask = code_place(M_UNIT, block, row, column, width, inside, BLOCKS, WHOLE)
        v_place, v_mask = code_place(V_UNIT, block, row, column, width, inside, BLOCKS, WHOLE)

        p_at = at(at_tensor, P, WHOLE) + base * 32 + place
        g_at = at(at_tensor + 1, G, WHOLE) + base * 32 + place
        m_at = at(at_tensor + 2, M, WHOLE) + base * M_UNIT + m_place
        v_at = at(at_tensor + 4, V, WHOLE) + base * V_UNIT + v_place
        p = read(p_at, mask, WHOLE)
        g = read(g_at, mask, WHOLE)
        m_codes = read(m_at, m_mask, WHOLE)
        v_codes = read(v_at, v_mask, WHOLE)
        low, m_scale, v_scale = 0, 0, 0
        if LOW is not None:
            low_at = at(at_tensor + 6, LOW, WHOLE) + base * 32 + place
            low = read(low_at, mask, WHOLE)
        if M_SCALE is not None:
            m_scale_at = at(at_tensor + 3, M_SCALE, False) + base + block
            m_scale = read(m_scale_at, inside, WHOLE)
        if V_SCALE is not None:
            v_scale_at = at(at_tensor + 5, V_SCALE, False) + base + block
            v_scale = read(v_scale_at, inside, WHOLE)

        s = scalars + tensor * 9
        p, low, m_codes, m_scale, v_codes, v_scale = step_tile(
            p, low, g, m_codes, m_scale, v_codes, v_scale, first, lanes, tl.load(dithers + tensor), tl.load(s),
            tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5), tl.load(s + 6),
            tl.load(s + 7), tl.load(s + 8),
            RULE, M_DECODE, M_ENCODE, V_DECODE, V_ENCODE, W_DECODE, W_ENCODE,
        )  # fmt: skip
        write(p_at, p, mask, WHOLE)
        write(m_at, m_codes, m_mask, WHOLE)
        write(v_at, v_codes, v_mask, WHOLE)
        if LOW is not None:
            write(low_at, low, mask, WHOLE)
        if M_SCALE is not None:
            write(m_scale_at, m_scale, inside, WHOLE)
        if V_SCALE is not None:
            write(v_scale_at, v_scale, inside, WHOLE)
