// Sums of products by tiles in local memory, for devices whose work-items run in parallel. Prepended to the GPU kernels.
//
//   C (TILE x TILE)  +=  A (TILE x DEPTH)  B (DEPTH x TILE),  a work-group of GROUP x GROUP work-items
//
// Each work-item sums ITEM x ITEM elements, GROUP apart, so that neighbouring work-items read and write neighbours. The code
// has no subgroups and no vector types: compilers for GPUs vectorise it. GROUP, ITEM and DEPTH are options.

#define TILE (GROUP * ITEM)
#define WORK_GROUP __attribute__((reqd_work_group_size(GROUP, GROUP, 1)))
#define ROW0 ((int)get_group_id(1) * TILE)
#define COL0 ((int)get_group_id(0) * TILE)

// A kernel declares one array of each type; the additional column puts neighbours into different banks.
#define TILES __local float a_tile[DEPTH][TILE + 1], b_tile[DEPTH][TILE + 1]; float sums[ITEM][ITEM]

// Sums over first <= k < last. The caller's macros A(row, k) and B(k, col) read an element, or give 0 outside. With A_ALONG_K
// or B_ALONG_K, k is contiguous in memory, and neighbouring work-items read along k.
#define MULTIPLY(A, A_ALONG_K, B, B_ALONG_K, first, last)                                                      \
  {                                                                                                            \
    const int across = get_local_id(0), down = get_local_id(1), item = down * GROUP + across;                  \
    for (int m = 0; m < ITEM; m++)                                                                             \
      for (int n = 0; n < ITEM; n++) sums[m][n] = 0.0f;                                                        \
    for (int k0 = first; k0 < last; k0 += DEPTH) {                                                             \
      for (int e = item; e < TILE * DEPTH; e += GROUP * GROUP) {                                               \
        const int ar = (A_ALONG_K) ? e / DEPTH : e % TILE, ak = (A_ALONG_K) ? e % DEPTH : e / TILE;            \
        const int bc = (B_ALONG_K) ? e / DEPTH : e % TILE, bk = (B_ALONG_K) ? e % DEPTH : e / TILE;            \
        a_tile[ak][ar] = k0 + ak < last ? A(ROW0 + ar, k0 + ak) : 0.0f;                                        \
        b_tile[bk][bc] = k0 + bk < last ? B(k0 + bk, COL0 + bc) : 0.0f;                                        \
      }                                                                                                        \
      barrier(CLK_LOCAL_MEM_FENCE);                                                                            \
      for (int k = 0; k < DEPTH; k++) {                                                                        \
        float a[ITEM], b[ITEM];                                                                                \
        for (int m = 0; m < ITEM; m++) a[m] = a_tile[k][down + m * GROUP];                                     \
        for (int n = 0; n < ITEM; n++) b[n] = b_tile[k][across + n * GROUP];                                   \
        for (int m = 0; m < ITEM; m++)                                                                         \
          for (int n = 0; n < ITEM; n++) sums[m][n] = fma(a[m], b[n], sums[m][n]);                             \
      }                                                                                                        \
      barrier(CLK_LOCAL_MEM_FENCE);                                                                            \
    }                                                                                                          \
  }

// Begins a loop over this work-item's elements of C: `row`, `col`, `sum`. EACH_END ends it.
#define EACH(rows, cols)                                                                                       \
  for (int m = 0; m < ITEM; m++)                                                                               \
    for (int n = 0; n < ITEM; n++) {                                                                           \
      const int row = ROW0 + get_local_id(1) + m * GROUP;                                                      \
      const int col = COL0 + get_local_id(0) + n * GROUP;                                                      \
      const float sum = sums[m][n];                                                                            \
      if (row < rows && col < cols) {
#define EACH_END \
  }              \
  }
