// Writes at places given by index, on graphics cards. Needs scatter.cl before it, for TYPE and JOIN.
//
// Floats are never added by atomic operations, whose order changes from run to run. Instead the sources are sorted by place.
// Then each element of the result belongs to one work-item, which joins its sources in their order, as processors do.

// Sorts sources by their place, and sources of one place by their number: sorted[p] and places[p] are the p-th source and its
// place. A source's position is the number of smaller ones, which its work-item counts: `count`^2 comparisons without another
// kernel, which take less time than moving the sources' rows.
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void sort_sources(
    __global const long *restrict index, __global int *restrict sorted, __global long *restrict places, const int count)
{
    __local long others[GROUP];
    const int source = get_global_id(0), item = get_local_id(0);
    const long place = source < count ? index[source] : 0;
    int before = 0;
    for (int first = 0; first < count; first += GROUP) {
        barrier(CLK_LOCAL_MEM_FENCE);
        others[item] = first + item < count ? index[first + item] : 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        const int loaded = min(GROUP, count - first);
        for (int k = 0; k < loaded; ++k)
            before += others[k] < place || (others[k] == place && first + k < source);
    }
    if (source < count) {
        sorted[before] = source;
        places[before] = place;
    }
}

// put_sorted: joins rows[s][c] to out[index[s]][c], for sorted sources. rows is count x width, out is table x width. It skips
// rows with index `skip` or outside the table. A work-item has column c of a place if position p is the place's first.
__kernel void put_sorted(
    __global const TYPE *restrict rows, __global const int *restrict sorted, __global const long *restrict places,
    __global TYPE *restrict out, const int count, const int width, const int table, const int skip)
{
    const int p = get_global_id(0) / width, c = get_global_id(0) % width;
    if (p >= count)
        return;
    const long place = places[p];
    if (place == skip || place < 0 || place >= table || (p > 0 && places[p - 1] == place))
        return;
    __global TYPE *to = out + (int)place * width + c;
    TYPE value = *to;
    for (int q = p; q < count && places[q] == place; ++q)
        value = JOIN(value, rows[sorted[q] * width + c]);
    *to = value;
}

// put_columns: along a dimension of `out` with `size` elements, `step` apart, joins lines[s][g] to element index[s][g] of line
// g for s = 0 .. count - 1. Work-item g has line g, so neighbours read neighbours; element 0 of the line is out[base[g]].
// Negative indices count from the end.
__kernel void put_columns(
    __global const TYPE *restrict lines, __global const long *restrict index, __global const int *restrict base,
    __global TYPE *restrict out, const int number, const int count, const int step, const int size)
{
    const int line = get_global_id(0);
    if (line >= number)
        return;
    for (int s = 0; s < count; ++s) {
        const long given = index[s * number + line], at = given < 0 ? given + size : given;
        if (at < 0 || at >= size)
            continue;
        __global TYPE *to = out + base[line] + (int)at * step;
        *to = JOIN(*to, lines[s * number + line]);
    }
}
