// Rows that LANES work-items of a work-group share, for devices whose work-items run in parallel. Prepended to kernels over
// rows. GROUP and LANES are options, powers of two.
//
// A work-group has GROUP / LANES rows. Lane i of a row takes elements i, i + LANES, ..., so neighbours read neighbours.
// Work-items beyond the last row take no element, but they reach the same barriers.

#define WORK_GROUP __attribute__((reqd_work_group_size(GROUP, 1, 1)))
#define LANE ((int)get_local_id(0) % LANES)
#define ROW ((int)get_global_id(0) / LANES)

// Loops over the lane's elements of a row of `count`. Unrolled, so that it loads several elements before it waits for one.
#define EACH(i, count) _Pragma("unroll 4") for (int i = LANE; i < (count); i += LANES)

#define ADDED(a, b) ((a) + (b))
#define HIGHER(a, b) fmax(a, b)

// Functions that join the lanes' values in a tree, in local memory of GROUP elements; each lane gets the result of its row.
#define TREE(name, TYPE, JOIN)                                                       \
  static inline TYPE name(const TYPE mine, __local TYPE* tree) {                     \
    const int item = get_local_id(0);                                                \
    barrier(CLK_LOCAL_MEM_FENCE); /* all lanes have read the result before this one */ \
    tree[item] = mine;                                                               \
    for (int apart = LANES / 2; apart > 0; apart /= 2) {                             \
      barrier(CLK_LOCAL_MEM_FENCE);                                                  \
      if (LANE < apart) tree[item] = JOIN(tree[item], tree[item + apart]);           \
    }                                                                                \
    barrier(CLK_LOCAL_MEM_FENCE);                                                    \
    return tree[item - LANE];                                                        \
  }
TREE(sum_of_row, float, ADDED)
TREE(sums_of_row, float2, ADDED)
TREE(peak_of_row, float, HIGHER)
