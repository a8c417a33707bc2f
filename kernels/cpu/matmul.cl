// Matrix products on CPUs: C = alpha * A B + beta * bias, batched, any strides.
//
//   left   A, M x K; element (row, k) at row * left_row + k * left_k. Matrices of the batch are in the order [outer][inner],
//          with the strides left_outer and left_batch. Or panels of A that were packed before:
//          [batch][ceil(M / ROWS)][K][ROWS], zero-padded, where left_row is K and left_k is ROWS
//   right  B, K x N, in the same way. Or panels [batch][ceil(N / COLS)][K][COLS]
//   room   [work-items][room_size]: a group of panels of B, and all panels of A, that a work-item packs for itself
//   C      [batch][M][N]
//
// `matmul` is the register tile of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
// (2008): ROWS x COLS accumulators stay in registers while one block of K streams through. A work-item computes a part of C.
// It packs a panel of B just before its use; the panel stays in a second-level cache while panels of A pass by. It packs a
// panel of A at its first use, or reads A in place. Panels that are neighbours in memory are packed as a group.
// Kernels with an epilogue are generated: they compute more from a tile before they store it.
// `matmul_thin` is for products with too few rows or operations for packing to pay.

#define ROWS 12
#define COLS 32
#define GROUP 2
#define LEFT_GROUP 4
#define DEPTH_CHUNK 128

// Prefetches the line at `p`, for an epilogue or for packing, into the second-level cache: in the first, rows of several
// tensors that are a power of two apart would evict each other. `PREFETCH_NEAR` prefetches into the first.
#ifdef NO_PREFETCH
#define PREFETCH(p)
#define PREFETCH_NEAR(p)
#else
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
#define PREFETCH_NEAR(p) __builtin_prefetch((const void*)(size_t)(p), 0, 3)
#endif

// For `matmul` and generated kernels: PRODUCT, their parameters; PART, the work-item's part of C, from (`first_row`,
// `first_col`) on; the panels for the tile at (row0, col0); and FINISH, which turns the sums of a tile into elements of C.
// A panel is `packed` before, `contiguous` along its rows, `transposed` (contiguous along k) or `strided`; or rows of A,
// contiguous along k, are read `in_place`. `c` carries the sums of earlier blocks of depth; it is read only if k0 > 0.
#define PRODUCT(C)                                                                                           \
  const int inner, __global const float *restrict left, const int left_offset, const int left_outer,         \
      const int left_batch, const int left_row, const int left_k, __global const float *restrict right,      \
      const int right_offset, const int right_outer, const int right_batch, const int right_k,               \
      const int right_col, __global float *restrict room, const int room_size, const int part_rows,          \
      const int part_cols, __global C, const int rows, const int cols, const int depth, const int k0,        \
      const int k1, const float alpha, const float beta, __global const float *restrict bias,                \
      const int bias_offset, const int bias_batch, const int bias_row, const int bias_col
#define PART                                                                                               \
  const int batch = get_global_id(2), first_row = (int)get_global_id(0) * part_rows,                       \
            first_col = (int)get_global_id(1) * part_cols, last_row = min(rows, first_row + part_rows),    \
            last_col = min(cols, first_col + part_cols),                                                   \
            left_at = left_offset + batch / inner * left_outer + batch % inner * left_batch,               \
            right_at = right_offset + batch / inner * right_outer + batch % inner * right_batch;           \
  __global float* const right_room =                                                                       \
      room + ((batch * (int)get_global_size(1) + (int)get_global_id(1)) * (int)get_global_size(0) +        \
              (int)get_global_id(0)) * room_size;                                                          \
  __global float* const left_room = right_room + (k1 - k0) * COLS * GROUP
#define PANEL_OF(form) panel_##form
#define PANEL(form) PANEL_OF(form)
#define RIGHT_PANEL(form)                                                                                  \
  PANEL(form)(right + right_at + col0 * right_col + k0 * right_k, right_col, right_k, last_col - col0, COLS, \
              k1 - k0, true, (col0 - first_col) / COLS,                                                      \
              right_room + (col0 - first_col) / COLS % GROUP * COLS * (k1 - k0))
#define LEFT_PANEL(form)                                                                                    \
  PANEL(form)(left + left_at + row0 * left_row + k0 * left_k, left_row, left_k, last_row - row0, ROWS, k1 - k0, \
              col0 == first_col, (row0 - first_row) / ROWS, left_room + (row0 - first_row) * (k1 - k0))
// Strides of a panel of A, from row to row and from k to k.
#define STEPS_OF(form) STEPS_##form
#define STEPS(form) STEPS_OF(form)
#define STEPS_packed 1, ROWS
#define STEPS_contiguous STEPS_packed
#define STEPS_transposed STEPS_packed
#define STEPS_strided STEPS_packed
#define STEPS_in_place left_row, 1
// Prefetches a part of the next panel of B, before this panel's tile at row0 is computed.
#define FETCH_OF(form) fetch_##form
#define FETCH(form) FETCH_OF(form)
#define FETCH_NEXT(form)                                                                                          \
  FETCH(form)(right + right_at + (col0 + COLS) * right_col + k0 * right_k, right_col, last_col - col0 - COLS, k1 - k0, \
              (row0 - first_row) / ROWS, (last_row - first_row + ROWS - 1) / ROWS)
#define FINISH(sums)                                                                                      \
  finish(sums, row_count, cols - col0, k0 > 0, c + (batch * rows + row0) * cols + col0, cols, k1 == depth, \
         alpha, beta, bias + bias_offset + batch * bias_batch + row0 * bias_row + col0 * bias_col, bias_row, bias_col)

// The first COUNT rows of a tile. Each COUNT has a function: compilers unroll loops into registers only for literal bounds.
#define MULTIPLY_ROWS(name, COUNT)                                                                            \
  inline void name(__global const float* restrict a, const int a_row, const int a_k,                          \
                   __global const float* restrict b, const int depth, float16 sums[ROWS][2]) {                \
    float16 lo[COUNT], hi[COUNT];                                                                             \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) lo[m] = hi[m] = (float16)(0.0f);                        \
    for (int k = 0; k < depth; k++) {                                                                         \
      const float16 b_lo = vload16(0, b), b_hi = vload16(1, b);                                               \
      _Pragma("unroll") for (int m = 0; m < COUNT; m++) {                                                     \
        const float value = a[m * a_row];                                                                     \
        lo[m] = fma((float16)(value), b_lo, lo[m]);                                                           \
        hi[m] = fma((float16)(value), b_hi, hi[m]);                                                           \
      }                                                                                                       \
      a += a_k;                                                                                               \
      b += COLS;                                                                                              \
    }                                                                                                         \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) {                                                       \
      sums[m][0] = lo[m];                                                                                     \
      sums[m][1] = hi[m];                                                                                     \
    }                                                                                                         \
  }
#ifndef NARROW
MULTIPLY_ROWS(multiply_4, 4)
MULTIPLY_ROWS(multiply_8, 8)
MULTIPLY_ROWS(multiply_12, ROWS)
#else
// 16 registers of 8 floats hold the sums of 6 rows x 16 columns, and their operands: a tile has four of these parts.
#define MULTIPLY_PART(name, COUNT)                                                                             \
  inline void name(__global const float* restrict a, const int a_row, const int a_k,                          \
                   __global const float* restrict b, const int depth, float16 sums[ROWS][2], const int row,   \
                   const int half_of_columns) {                                                               \
    float16 sum[COUNT];                                                                                       \
    a += row * a_row;                                                                                         \
    b += half_of_columns * LANES;                                                                             \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) sum[m] = (float16)(0.0f);                               \
    for (int k = 0; k < depth; k++) {                                                                         \
      const float16 columns = vload16(0, b);                                                                  \
      _Pragma("unroll") for (int m = 0; m < COUNT; m++)                                                       \
        sum[m] = fma((float16)(a[m * a_row]), columns, sum[m]);                                               \
      a += a_k;                                                                                               \
      b += COLS;                                                                                              \
    }                                                                                                         \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) sums[row + m][half_of_columns] = sum[m];                \
  }
MULTIPLY_PART(multiply_part_4, 4)
MULTIPLY_PART(multiply_part_6, 6)

inline void multiply_4(__global const float* a, const int a_row, const int a_k, __global const float* b,
                       const int depth, float16 sums[ROWS][2]) {
  for (int n = 0; n < 2; n++) multiply_part_4(a, a_row, a_k, b, depth, sums, 0, n);
}
inline void multiply_8(__global const float* a, const int a_row, const int a_k, __global const float* b,
                       const int depth, float16 sums[ROWS][2]) {
  for (int row = 0; row < 8; row += 4)
    for (int n = 0; n < 2; n++) multiply_part_4(a, a_row, a_k, b, depth, sums, row, n);
}
inline void multiply_12(__global const float* a, const int a_row, const int a_k, __global const float* b,
                        const int depth, float16 sums[ROWS][2]) {
  for (int row = 0; row < ROWS; row += 6)
    for (int n = 0; n < 2; n++) multiply_part_6(a, a_row, a_k, b, depth, sums, row, n);
}
#endif

// The sums of a tile's first `rows` rows, up to 12, in steps of four rows; elements of A are at row * a_row + k * a_k.
inline void multiply_rows(__global const float* restrict a, const int a_row, const int a_k,
                          __global const float* restrict b, const int rows, const int depth,
                          float16 sums[ROWS][2]) {
  if (rows <= 4)
    multiply_4(a, a_row, a_k, b, depth, sums);
  else if (rows <= 8)
    multiply_8(a, a_row, a_k, b, depth, sums);
  else
    multiply_12(a, a_row, a_k, b, depth, sums);
}

// Finishes the first `rows` rows of a tile with `count` columns: adds the sums of earlier blocks of depth; after the last
// block, also scales and adds the bias. Most products need none of this, so the function is not inlined: inlined code would
// take registers from the kernel's stores (3 % of the time in some kernels).
__attribute__((noinline)) void finish(float16 sums[ROWS][2], const int rows, const int count, const bool resume,
                   __global const float* carried, const int carried_row, const bool last, const float alpha,
                   const float beta, __global const float* bias, const int bias_row, const int bias_col) {
  if (resume)
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < 2; n++)
        sums[m][n] += load_upto(carried + m * carried_row + n * LANES, count - n * LANES);
  if (last && alpha != 1.0f)
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < 2; n++) sums[m][n] *= alpha;
  if (last && beta != 0.0f) {
    float16 added[2];
    for (int m = 0; m < rows; m++) {
      for (int n = 0; n < 2; n++) {
        if (m == 0 || bias_row != 0)  // else the bias is the same for all rows
          added[n] = beta * load_strided(bias + m * bias_row + n * LANES * bias_col, bias_col, count - n * LANES);
        sums[m][n] += added[n];
      }
    }
  }
}

// Copies `width` neighbours, 12 or 32.
inline void copy_floats(__global const float* from, __global float* to, const int width) {
  if (width % LANES == 0) {
#pragma unroll
    for (int i = 0; i < width / LANES; i++) vstore16(vload16(i, from), i, to);
  } else {
#pragma unroll
    for (int i = 0; i < width / 4; i++) vstore4(vload4(i, from), i, to);
  }
}

// Packs every k of a panel; `count` of its `width` rows exist.
inline void pack_contiguous(__global const float* src, const int stride_k, const int count, const int width,
                            const int k0, const int k1, __global float* dst) {
  for (int k = k0; k < k1; k++) {
    if (count >= width)
      copy_floats(src + k * stride_k, dst + k * width, width);
    else
      for (int i = 0; i < width; i++) dst[k * width + i] = i < count ? src[k * stride_k + i] : 0.0f;
  }
}

// Packs a group of panels of B, which are neighbours in memory at every k.
inline void pack_columns(__global const float* src, const int stride_k, const int depth, __global float* dst) {
  for (int k = 0; k < depth; k++) {
#pragma unroll
    for (int n = 0; n < GROUP; n++)
      copy_floats(src + k * stride_k + n * COLS, dst + (n * depth + k) * COLS, COLS);
  }
}

// Packs a group of panels of A, in whole vectors.
inline void pack_rows(__global const float* src, const int stride_k, const int depth, __global float* dst) {
  const int panel = depth * ROWS;
  for (int k = 0; k < depth; k++, src += stride_k, dst += ROWS) {
    const float16 x = vload16(0, src), y = vload16(1, src), z = vload16(2, src);
    vstore8(x.lo, 0, dst);
    vstore4(x.hi.lo, 0, dst + 8);
    vstore4(x.hi.hi, 0, dst + panel);
    vstore8(y.lo, 0, dst + panel + 4);
    vstore8(y.hi, 0, dst + 2 * panel);
    vstore4(z.lo.lo, 0, dst + 2 * panel + 8);
    vstore4(z.lo.hi, 0, dst + 3 * panel);
    vstore8(z.hi, 0, dst + 3 * panel + 4);
  }
}

// Packs a group of panels, or all panels that exist if the group is not full.
inline void pack_group(__global const float* src, const int stride_k, const int count, const int width,
                       const int depth, __global float* dst) {
  if (width == COLS && count >= GROUP * COLS) {
    pack_columns(src, stride_k, depth, dst);
  } else if (width == ROWS && count >= LEFT_GROUP * ROWS) {
    pack_rows(src, stride_k, depth, dst);
  } else {
    const int most = min(count, width * (width == ROWS ? LEFT_GROUP : GROUP));
    for (int first = 0; first < most; first += width)
      pack_contiguous(src + first, stride_k, count - first, width, 0, depth, dst + first * depth);
  }
}

// Packs 16 k of 16 rows, or of the 12 remaining rows of a panel, by a transpose in registers.
inline void pack_tile(__global const float* src, const int stride_row, const int width, const int rows,
                      __global float* dst) {
  float16 r[LANES];
#pragma unroll
  for (int i = 0; i < LANES; i++) r[i] = i < rows ? vload16(0, src + i * stride_row) : (float16)(0.0f);
  transpose_rows(r);
#pragma unroll
  for (int i = 0; i < LANES; i++) {
    if (rows >= LANES) {
      vstore16(r[i], 0, dst + i * width);
    } else {
      vstore8(r[i].lo, 0, dst + i * width);
      vstore4(r[i].hi.lo, 0, dst + i * width + 8);
    }
  }
}

// The same at the edges of the matrix: `count` rows and `depth` k exist.
inline void pack_edge(__global const float* src, const int stride_row, const int width, const int rows,
                      const int count, const int depth, __global float* dst) {
  float tile[LANES * LANES];
  for (int i = 0; i < LANES; i++)
    vstore16(i < count ? load_upto(src + i * stride_row, depth) : (float16)(0.0f), i, tile);
  transpose16(tile);
  for (int i = 0; i < depth; i++)
    for (int row = 0; row < rows; row++) dst[i * width + row] = tile[i * LANES + row];
}

// Packs rows that are contiguous along k.
inline void pack_transposed(__global const float* src, const int stride_row, const int count, const int width,
                            const int k0, const int k1, __global float* dst) {
  for (int k = k0; k < k1; k += LANES) {
    for (int base = 0; base < width; base += LANES) {
      const int rows = min(width - base, LANES);
      __global const float* from = src + base * stride_row + k;
      __global float* to = dst + k * width + base;
      if (count >= base + rows && k + LANES <= k1)
        pack_tile(from, stride_row, width, rows, to);
      else
        pack_edge(from, stride_row, width, rows, count - base, min(k1 - k, LANES), to);
    }
  }
}

inline void pack_strided(__global const float* src, const int stride_row, const int stride_k, const int count,
                         const int width, const int k0, const int k1, __global float* dst) {
  for (int k = k0; k < k1; k++)
    for (int i = 0; i < width; i++)
      dst[k * width + i] = i < count ? src[i * stride_row + k * stride_k] : 0.0f;
}

// Returns a panel of `width` rows, where `count` rows exist; `row` and `k` are its strides in `src`. Panels that are packed, or
// read in place, stay in `src`. Others are copied to `room` if `is_new`: one by one or, if `contiguous`, a group at a time.
#define PANEL_ARGUMENTS                                                                                        \
  __global const float *src, const int row, const int k, const int count, const int width, const int depth, \
      const bool is_new, const int number, __global float *room
inline __global const float* panel_packed(PANEL_ARGUMENTS) { return src; }
inline __global const float* panel_in_place(PANEL_ARGUMENTS) {
  // Prefetches the start of each row of the next tile: a processor predicts the rest of a row, but not its start.
  for (int m = ROWS; m < min(count, 2 * ROWS); m++) {
    PREFETCH_NEAR(src + m * row);
    PREFETCH_NEAR(src + m * row + LANES);
  }
  return src;
}
inline __global const float* panel_contiguous(PANEL_ARGUMENTS) {
  if (is_new && number % (width == ROWS ? LEFT_GROUP : GROUP) == 0) pack_group(src, k, count, width, depth, room);
  return room;
}
inline __global const float* panel_transposed(PANEL_ARGUMENTS) {
  if (is_new) pack_transposed(src, row, min(count, width), width, 0, depth, room);
  return room;
}
inline __global const float* panel_strided(PANEL_ARGUMENTS) {
  if (is_new) pack_strided(src, row, k, min(count, width), width, 0, depth, room);
  return room;
}

// Only columns that are contiguous along k need this, since they are far apart. The last quarter of the `tiles` prefetches, so
// that the lines are still in the cache when panel `src` is packed. Its columns are `col` apart, and `count` of them exist.
#define FETCH_ARGUMENTS                                                                                           \
  __global const float *src, const int col, const int count, const int depth, const int tile, const int tiles
inline void fetch_packed(FETCH_ARGUMENTS) {}
inline void fetch_contiguous(FETCH_ARGUMENTS) {}
inline void fetch_strided(FETCH_ARGUMENTS) {}
inline void fetch_transposed(FETCH_ARGUMENTS) {
  const int asking = tiles / 4, number = tile - (tiles - asking);
  if (number < 0 || count < COLS) return;
  const int lines = (depth + LANES - 1) / LANES * COLS, last = lines * (number + 1) / asking;
  for (int i = lines * number / asking; i < last; i++) PREFETCH(src + i % COLS * col + i / COLS * LANES);
}

#ifdef LEFT

// Options LEFT and RIGHT: forms of the operands' panels.
// C gets alpha * sum + beta * bias when `k1` reaches `depth`; before, it carries the sums of earlier blocks.
// global size: parts of rows, parts of columns, batch
WORK_ITEM __kernel void matmul(PRODUCT(float* restrict c)) {
  PART;
  for (int col0 = first_col; col0 < last_col; col0 += COLS) {
    __global const float* b = RIGHT_PANEL(RIGHT);
    const int col_count = cols - col0;
    for (int row0 = first_row; row0 < last_row; row0 += ROWS) {
      __global const float* a = LEFT_PANEL(LEFT);
      FETCH_NEXT(RIGHT);
      const int row_count = min(rows - row0, ROWS);
      __global float* out = c + (batch * rows + row0) * cols + col0;
      for (int m = 0; m < row_count; m++) {
        PREFETCH_WRITE(out + m * cols);
        if (col_count > LANES) PREFETCH_WRITE(out + m * cols + LANES);
      }
      float16 sums[ROWS][2];  // in memory: the loop over it stays small
      multiply_rows(a, STEPS(LEFT), b, row_count, k1 - k0, sums);
      FINISH(sums);
      if (col_count >= COLS) {  // without a check per vector, which takes 3 % of a product of size 512
        for (int m = 0; m < row_count; m++) {
          vstore16(sums[m][0], 0, out + m * cols);
          vstore16(sums[m][1], 1, out + m * cols);
        }
      } else {
        for (int m = 0; m < row_count; m++)
          for (int n = 0; n < 2; n++)
            store_upto(sums[m][n], out + m * cols + n * LANES, col_count - n * LANES);
      }
    }
  }
}

#endif
#ifndef EPILOGUE  // an option for programs that need only the code above: they compile faster

inline void pack(__global const float* src, const int batch_stride, const int stride_row, const int stride_k,
                 const int rows, const int depth, const int width, __global float* dst) {
  const int panel = get_global_id(0), batch = get_global_id(2);
  const int k0 = get_global_id(1) * DEPTH_CHUNK, k1 = min(k0 + DEPTH_CHUNK, depth);
  const int count = min(rows - panel * width, width);
  src += batch * batch_stride + panel * width * stride_row;
  dst += (batch * (int)get_global_size(0) + panel) * depth * width;
  if (stride_row == 1)
    pack_contiguous(src, stride_k, count, width, k0, k1, dst);
  else if (stride_k == 1)
    pack_transposed(src, stride_row, count, width, k0, k1, dst);
  else
    pack_strided(src, stride_row, stride_k, count, width, k0, k1, dst);
}

// global size: panels, chunks of K, batch
WORK_ITEM __kernel void pack_left(__global const float* a, const int offset, const int batch_stride,
                                  const int stride_row, const int stride_k, const int rows, const int depth,
                                  __global float* left) {
  pack(a + offset, batch_stride, stride_row, stride_k, rows, depth, ROWS, left);
}

WORK_ITEM __kernel void pack_right(__global const float* b, const int offset, const int batch_stride,
                                   const int stride_col, const int stride_k, const int cols, const int depth,
                                   __global float* right) {
  pack(b + offset, batch_stride, stride_col, stride_k, cols, depth, COLS, right);
}

// Sums of 16 columns of b for one row a; reads b along the dimension that is contiguous.
inline float16 row_times_columns(__global const float* a, const int a_k, __global const float* b, const int b_k,
                                 const int b_col, const int depth, const int count) {
  float16 sum = (float16)(0.0f);
  if (a_k == 1 && b_k == 1 && depth >= LANES) {
    float lane[LANES];
    for (int n = 0; n < LANES; n++) {
      float16 dot16 = (float16)(0.0f);
      if (n < count)
        for (int k = 0; k < depth; k += LANES)
          dot16 = fma(load_upto(a + k, depth - k), load_upto(b + n * b_col + k, depth - k), dot16);
      lane[n] = sum_lanes(dot16);
    }
    sum = vload16(0, lane);
  } else {
    for (int k = 0; k < depth; k++) sum = fma((float16)(a[k * a_k]), load_strided(b + k * b_k, b_col, count), sum);
  }
  return sum;
}

// global size: blocks of 16 columns, rows, batch
WORK_ITEM __kernel void matmul_thin(__global const float* restrict a, const int a_offset, const int a_batch,
                                    const int a_row, const int a_k, __global const float* restrict b,
                                    const int b_offset, const int b_batch, const int b_k, const int b_col,
                                    __global float* restrict c, const int c_batch, const int c_row,
                                    const int c_col, const int cols, const int depth, const float alpha,
                                    const float beta, __global const float* restrict bias, const int bias_offset,
                                    const int bias_batch, const int bias_row, const int bias_col) {
  const int col = get_global_id(0) * LANES, row = get_global_id(1), batch = get_global_id(2);
  const int count = min(cols - col, LANES);
  a += a_offset + batch * a_batch + row * a_row;
  b += b_offset + batch * b_batch + col * b_col;
  float16 sum = alpha * row_times_columns(a, a_k, b, b_k, b_col, depth, count);
  if (beta != 0.0f)
    sum += beta * load_strided(bias + bias_offset + batch * bias_batch + row * bias_row + col * bias_col, bias_col, count);
  store_strided(sum, c + batch * c_batch + row * c_row + col * c_col, c_col, count);
}

#endif
