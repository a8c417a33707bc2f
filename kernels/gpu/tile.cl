// Sums of products by tiles in local memory, for devices whose work-items run in parallel. Prepended to the GPU kernels.
//
//   C (TILE x TILE)  +=  A (TILE x DEPTH)  B (DEPTH x TILE),  a work-group of GROUP x GROUP work-items
//
// Each work-item sums ITEM x ITEM elements: in each direction runs of RUN neighbours, GROUP runs apart. All loops over a
// work-item's elements are unrolled, so that the sums stay in registers. The loop over k is not: more than 128 registers
// would leave room for only one work-group on a multiprocessor of NVIDIA's. While a work-item adds one step's products, it
// already loads its elements of the next step. GROUP, ITEM, DEPTH and DOUBLE are options.
//
// A line is a row of A or a column of B. The options A_ALONG and B_ALONG say along which direction neighbouring work-items
// load: K or LINES. A_WIDTH and B_WIDTH say how many neighbours in memory a work-item loads as a vector: 4 or 1.

#define TILE (GROUP * ITEM)
#define ITEMS (GROUP * GROUP)
#define WORK_GROUP __attribute__((reqd_work_group_size(GROUP, GROUP, 1)))
#define ROW0 ((int)get_group_id(1) * TILE)
#define COL0 ((int)get_group_id(0) * TILE)
#define ACROSS ((int)get_local_id(0))
#define DOWN ((int)get_local_id(1))
#define ITEM_NUMBER (DOWN * GROUP + ACROSS)
#define UNROLL _Pragma("unroll")

#if ITEM == 2
#define RUN 2
typedef float2 Run;
#else
#define RUN 4
typedef float4 Run;
#endif
#define RUNS (ITEM / RUN)

// The additional four columns put neighbouring rows into different banks, and keep vectors aligned.
#define STRIDE (TILE + 4)
#define STEP_SIZE (2 * DEPTH * STRIDE)
#ifdef DOUBLE
#define STEPS 2
#define BETWEEN_STEPS
#else
#define STEPS 1
#define BETWEEN_STEPS barrier(CLK_LOCAL_MEM_FENCE)
#endif

// In local memory: DEPTH rows of A's tile, by k, then DEPTH rows of B's tile; twice with DOUBLE.
#define TILES                                         \
  __local float4 tiles[STEPS * STEP_SIZE / 4];        \
  Run sums[ITEM][RUNS]

// The line and the k, within a tile, of vector `v` of this work-item. Without vectors the k is the same for all `v` if the
// direction is K, and the line is the same for all `v` if it is LINES.
#define VECTOR(v) (ITEM_NUMBER + (v) * ITEMS)
#define LINE_K(v, width) (VECTOR(v) / (DEPTH / (width)))
#define K_K(v, width) (VECTOR(v) % (DEPTH / (width)) * (width))
#define LINE_LINES(v, width) (VECTOR(v) % (TILE / (width)) * (width))
#define K_LINES(v, width) (VECTOR(v) / (TILE / (width)))

// Vectors of a work-item, and whether vector `v` is part of the tile.
#define COUNT(width) ((TILE * DEPTH / (width) + ITEMS - 1) / ITEMS)
#define EXISTS(v, width) (TILE * DEPTH / (width) % ITEMS == 0 || VECTOR(v) < TILE * DEPTH / (width))

// Vectors in registers, for operands that load vectors of 4 or single elements.
#define Vector_4 float4
#define Vector_1 float
#define PUT_K_4(at, v) (at)[0] = (v).x, (at)[STRIDE] = (v).y, (at)[2 * STRIDE] = (v).z, (at)[3 * STRIDE] = (v).w
#define PUT_LINES_4(at, v) *(__local float4*)(at) = v
#define PUT_K_1(at, v) *(at) = v
#define PUT_LINES_1(at, v) *(at) = v

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define JOIN4(a, b, c, d) a##b##c##d
#define JOINED(a, b, c, d) JOIN4(a, b, c, d)

// Loads this work-item's vectors of the step that begins at `k0`.
#define FETCH(vectors, LOAD, along, width, k0, last)                                                         \
  UNROLL for (int v = 0; v < COUNT(width); v++) {                                                            \
    const int line = JOIN(LINE_, along)(v, width), k = k0 + JOIN(K_, along)(v, width);                       \
    vectors[v] = LOAD(line, k, EXISTS(v, width) && k < last);                                                \
  }

// Copies the vectors to local memory.
#define PUT(vectors, tile, along, width)                                                                     \
  UNROLL for (int v = 0; v < COUNT(width); v++) if (EXISTS(v, width)) {                                      \
    __local float* at = tile + JOIN(K_, along)(v, width) * STRIDE + JOIN(LINE_, along)(v, width);            \
    JOINED(PUT_, along, _, width)(at, vectors[v]);                                                           \
  }

#define MULTIPLY(LOAD_A, LOAD_B, first, last)                                                                \
  {                                                                                                          \
    JOIN(Vector_, A_WIDTH) a_next[COUNT(A_WIDTH)];                                                           \
    JOIN(Vector_, B_WIDTH) b_next[COUNT(B_WIDTH)];                                                           \
    UNROLL for (int m = 0; m < ITEM; m++) UNROLL for (int n = 0; n < RUNS; n++) sums[m][n] = (Run)(0.0f);    \
    __local float* tile = (__local float*)tiles;                                                             \
    FETCH(a_next, LOAD_A, A_ALONG, A_WIDTH, (first), (last))                                                 \
    FETCH(b_next, LOAD_B, B_ALONG, B_WIDTH, (first), (last))                                                 \
    for (int k0 = (first); k0 < (last); k0 += DEPTH) {                                                       \
      PUT(a_next, tile, A_ALONG, A_WIDTH)                                                                    \
      PUT(b_next, tile + DEPTH * STRIDE, B_ALONG, B_WIDTH)                                                   \
      barrier(CLK_LOCAL_MEM_FENCE);                                                                          \
      FETCH(a_next, LOAD_A, A_ALONG, A_WIDTH, k0 + DEPTH, (last))                                            \
      FETCH(b_next, LOAD_B, B_ALONG, B_WIDTH, k0 + DEPTH, (last))                                            \
      ADD_PRODUCTS(tile, tile + DEPTH * STRIDE)                                                              \
      BETWEEN_STEPS;                                                                                         \
      tile = (__local float*)tiles + (STEPS - 1) * STEP_SIZE - (tile - (__local float*)tiles);               \
    }                                                                                                        \
  }

#define ADD_PRODUCTS(a_tile, b_tile)                                                                         \
  _Pragma("unroll 2") for (int k = 0; k < DEPTH; k++) {                                                      \
    Run a[RUNS], b[RUNS];                                                                                    \
    UNROLL for (int m = 0; m < RUNS; m++)                                                                    \
      a[m] = *(__local const Run*)(a_tile + k * STRIDE + (m * GROUP + DOWN) * RUN);                          \
    UNROLL for (int n = 0; n < RUNS; n++)                                                                    \
      b[n] = *(__local const Run*)(b_tile + k * STRIDE + (n * GROUP + ACROSS) * RUN);                        \
    UNROLL for (int m = 0; m < ITEM; m++)                                                                    \
      UNROLL for (int n = 0; n < RUNS; n++) sums[m][n] = fma((Run)(((float*)a)[m]), b[n], sums[m][n]);       \
  }

// A loop over slices of C: the sums go through local memory, SLICE of a work-item's rows at a time, so that neighbouring
// work-items can write neighbours, and the code of an epilogue exists once. `slice` has SLICE_ROWS rows of TILE elements,
// STRIDE apart; SLICE_ROW(line) is the row of C. SLICES_END ends the loop.
#define MOST (STEPS * 2 * DEPTH / GROUP)
#define SLICE (MOST < ITEM ? MOST : ITEM)
#define SLICE_ROWS (SLICE * GROUP)
#define TILE_ROW(m, down) ((m) / RUN * GROUP * RUN + (down) * RUN + (m) % RUN)
#define SLICE_ROW(line) (ROW0 + TILE_ROW(first_m + (line) / GROUP, (line) % GROUP))

#define SLICES                                                                                               \
  for (int first_m = 0; first_m < ITEM; first_m += SLICE) {                                                  \
    __local float* slice = (__local float*)tiles;                                                            \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                            \
    UNROLL for (int m = 0; m < ITEM; m++) if (m >= first_m && m < first_m + SLICE)                           \
      UNROLL for (int n = 0; n < RUNS; n++)                                                                  \
        *(__local Run*)(slice + ((m - first_m) * GROUP + DOWN) * STRIDE + (n * GROUP + ACROSS) * RUN) = sums[m][n]; \
    barrier(CLK_LOCAL_MEM_FENCE);
#define SLICES_END }

// A loop over elements of C: `row`, `col`, `sum`. EACH_END ends it.
#define EACH(rows, cols)                                                                                     \
  SLICES                                                                                                     \
    for (int e = ITEM_NUMBER; e < SLICE_ROWS * TILE; e += ITEMS) {                                           \
      const int line = e / TILE, row = SLICE_ROW(line), col = COL0 + e % TILE;                               \
      const float sum = slice[line * STRIDE + e % TILE];                                                     \
      if (row < rows && col < cols) {
#define EACH_END \
  }              \
  }              \
  SLICES_END
