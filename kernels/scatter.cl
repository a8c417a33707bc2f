// Writes at places given by index. Deterministic: each element of the result belongs to one work-item, which takes the
// sources in order. If several sources have one place and JOIN overwrites, the last one stays.
//
//   TYPE   type of the elements     JOIN   one of the macros below: joins an element `a` of the result with a source `b`

#define SET(a, b) (b)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

// put_rows: joins rows[s][c] to out[index[s]][c] for s = 0 .. count - 1. rows is count x width, out is table x width, both
// row-major. It skips rows with index `skip` or outside the table. Work-item g has LANES columns from g * LANES on.
__kernel void put_rows(
    __global const TYPE *rows, __global const long *index, __global TYPE *out,
    const int count, const int width, const int table, const int skip)
{
    const int begin = get_global_id(0) * LANES;
    const int end = min(begin + LANES, width);
    for (int s = 0; s < count; ++s) {
        const long at = index[s];
        if (at == skip || at < 0 || at >= table)
            continue;
        for (int c = begin; c < end; ++c) {
            __global TYPE *to = out + (int)at * width + c;
            *to = JOIN(*to, rows[s * width + c]);
        }
    }
}

// put_lines: along a dimension of `out` with `size` elements, `step` apart, joins line[s] to element index[s] for
// s = 0 .. count - 1. Work-item g has line g; element 0 of this line is out[base[g]]. Negative indices count from the end.
__kernel void put_lines(
    __global const TYPE *lines, __global const long *index, __global const int *base, __global TYPE *out,
    const int count, const int step, const int size)
{
    const int line = get_global_id(0);
    for (int s = 0; s < count; ++s) {
        const long given = index[line * count + s], at = given < 0 ? given + size : given;
        if (at < 0 || at >= size)
            continue;
        __global TYPE *to = out + base[line] + (int)at * step;
        *to = JOIN(*to, lines[line * count + s]);
    }
}
