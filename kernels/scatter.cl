// Sums rows into rows given by index. Deterministic: a column belongs to one work-item, which takes
// the samples in order.
//
// add_rows: out[index[s]][c] += rows[s][c] for s = 0 .. count - 1. rows is count x width, out is
// table x width, both row-major. Rows of index `skip`, or outside the table, are left out.
// Work-item g has columns g * LANES to g * LANES + LANES - 1.

__kernel void add_rows(
    __global const TYPE *rows, __global const long *index, __global TYPE *out,
    const int count, const int width, const int table, const int skip)
{
    const int begin = get_global_id(0) * LANES;
    const int end = min(begin + LANES, width);
    for (int s = 0; s < count; ++s) {
        const long at = index[s];
        if (at == skip || at < 0 || at >= table)
            continue;
        for (int c = begin; c < end; ++c)
            out[(int)at * width + c] += rows[s * width + c];
    }
}
