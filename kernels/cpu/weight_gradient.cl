// Gradient of a convolution's weights on CPUs.
//
//   x     row-major [N][groups * depth][height][width]      dy  row-major [N][groups * lanes][rows * cols]
//   sums  [part][group][blocks of COLS lanes][kernel_h][tiles of DEPTH_TILE d][tiles of SUMS][SUMS][COLS]
//   dw    row-major [groups * lanes][depth][kernel_h][kernel_w]
//
// The pixels of a block of rows, or of images, are copied into panels. These stay in a second-level cache while all tiles of
// the result are summed over them, with SUMS x COLS sums in registers. A pixel of x has DEPTH_TILE channels side by side,
// followed by the same channels of the tap to the right: SUMS of these floats share the loads of dy.
// Pixels are summed in order, and parts of the pixels are added in order: deterministic.

#define COLS 32
#ifdef NARROW  // 16 registers of 8 floats
#define VECTORS 1
#else
#define VECTORS 2
#endif
#if DEPTH_TILE > 4  // a power of two
#define WIDE 8
#elif DEPTH_TILE > 2
#define WIDE 4
#else
#define WIDE DEPTH_TILE
#endif
#define SLACK (LANES * LANES)  // floats after a panel that packing may overwrite

// Parts of `room`, in floats: a panel of dy for each block of lanes, a panel of x for each tile of d, and 16 x 16 to spare.
#define DY_PANEL (image_block * row_block * cols * COLS + LANES * COLS)
#define X_ROWS ((row_block - 1) * stride_h + (kernel_h - 1) * dilation_h + 1)
#define X_COLS ((cols - 1) * stride_w + (kernel_w - 1) * dilation_w + 1)
#define X_PANEL (image_block * X_ROWS * X_COLS * DEPTH_TILE + SLACK)

// A pointer to 16 pixels of `rows` channels, `plane` floats apart: into the tensor if its `size` remaining floats suffice, even
// if these include unused pixels; else to a copy padded with zeros.
inline __global const float* readable(__global const float* src, int* plane, const int rows, const int size,
                                      __global float* spare) {
  if (size - (rows - 1) * *plane >= LANES) return src;
  for (int i = 0; i < rows; i++)
    for (int p = 0; p < LANES; p++) spare[i * LANES + p] = i * *plane + p < size ? src[i * *plane + p] : 0.0f;
  *plane = LANES;
  return spare;
}

// Packs pixels of 16 channels side by side, `stride` floats per pixel. Writes up to 15 pixels more.
inline void pack_lanes(__global const float* src, const int plane, const int pixels, const int size,
                       __global float* spare, const int stride, __global float* dst) {
  for (int p = 0; p < pixels; p += LANES) {
    int step = plane;
    __global const float* from = readable(src + p, &step, LANES, size - p, spare);
    float16 r[LANES];
#pragma unroll
    for (int i = 0; i < LANES; i++) r[i] = vload16(0, from + i * step);
    transpose_rows(r);
#pragma unroll
    for (int i = 0; i < LANES; i++) vstore16(r[i], 0, dst + (p + i) * stride);
  }
}

// The same for DEPTH_TILE channels.
#if DEPTH_TILE > 8
#define pack_channels(src, plane, pixels, size, spare, dst) \
  pack_lanes(src, plane, pixels, size, spare, DEPTH_TILE, dst)
#else
inline void pack_channels(__global const float* src, const int plane, const int pixels, const int size,
                          __global float* spare, __global float* dst) {
  for (int p = 0; p < pixels; p += LANES) {
    int step = plane;
    __global const float* from = readable(src + p, &step, WIDE, size - p, spare);
    float16 r[WIDE];
#pragma unroll
    for (int i = 0; i < WIDE; i++) r[i] = vload16(0, from + i * step);
#pragma unroll
    for (int round = 1; round < WIDE; round *= 2) {  // rounds of a perfect shuffle, as in `transpose_rows`
      float16 t[WIDE];
#pragma unroll
      for (int i = 0; i < WIDE / 2; i++) {
        t[2 * i] = INTERLEAVED(r[i], r[i + WIDE / 2], 0);
        t[2 * i + 1] = INTERLEAVED(r[i], r[i + WIDE / 2], 8);
      }
#pragma unroll
      for (int i = 0; i < WIDE; i++) r[i] = t[i];
    }
    __global float* to = dst + p * DEPTH_TILE;
#if DEPTH_TILE == WIDE
#pragma unroll
    for (int i = 0; i < WIDE; i++) vstore16(r[i], i, to);
#else
    float tile[WIDE * LANES];
#pragma unroll
    for (int i = 0; i < WIDE; i++) vstore16(r[i], i, tile);
    for (int i = 0; i < LANES; i++)
      for (int d = 0; d < DEPTH_TILE; d++) to[i * DEPTH_TILE + d] = tile[i * WIDE + d];
#endif
  }
}
#endif

inline void clear(__global float* p, const int count) {
  for (int i = 0; i < count; i += LANES) store_upto((float16)(0.0f), p + i, count - i);
}

// Packs `rows` rows of the input from row `top` on, after `left` columns of border. The border is zero, also above and below.
inline void pack_image(__global const float* x, const int plane, const int size, __global float* spare, const int height,
                       const int width, const int top, const int left, const int rows, const int cols,
                       __global float* dst) {
  const int before = min(left, cols), inside = min(width, cols - before);
  for (int r = 0; r < rows; r++) {
    const int row = top + r;
    __global float* to = dst + r * cols * DEPTH_TILE;
    if (row < 0 || row >= height || inside == 0) {
      clear(to, cols * DEPTH_TILE);
    } else {
      clear(to, before * DEPTH_TILE);
      pack_channels(x + row * width, plane, inside, size - row * width, spare, to + before * DEPTH_TILE);
      clear(to + (before + inside) * DEPTH_TILE, (cols - before - inside) * DEPTH_TILE);
    }
  }
}

// Adds the products of a block's pixels to a tile of sums, or to half of its columns.
inline void add_tile(__global const float* x, __global const float* dy, __global float* sums, const bool resume,
                     const int images, const int row_begin, const int row_end, const int cols, const int x_image,
                     const int x_row, const int x_col, const int tap_col, const int dy_image) {
  float16 sum[VECTORS][SUMS];
#pragma unroll
  for (int m = 0; m < VECTORS * SUMS; m++) sum[m / SUMS][m % SUMS] = (float16)(0.0f);
  for (int image = 0; image < images; image++) {
    for (int row = row_begin; row < row_end; row++) {
      __global const float* at = x + image * x_image + row * x_row;
      __global const float* lanes = dy + image * dy_image + row * cols * COLS;
      for (int col = 0; col < cols; col++) {
        float16 vector[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) vector[v] = vload16(v, lanes);
#pragma unroll
        for (int m = 0; m < SUMS; m++) {
          const float value = at[m / DEPTH_TILE * tap_col + m % DEPTH_TILE];
#pragma unroll
          for (int v = 0; v < VECTORS; v++) sum[v][m] = fma((float16)(value), vector[v], sum[v][m]);
        }
        at += x_col;
        lanes += COLS;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < SUMS; m++) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      if (resume) sum[v][m] += vload16(2 * m + v, sums);
      vstore16(sum[v][m], 2 * m + v, sums);
    }
  }
}

// A unit is a part of the pixels for a chunk of the lanes and of d. Output pixel (r, c) reads input pixel
// (r * stride_h - top, c * stride_w - left) at tap 0.
// global size: work-items, each with a part of `room`; they take units in turn
WORK_ITEM __kernel void weight_sums(
    __global const float* restrict x, __global const float* restrict dy, __global float* restrict sums,
    __global float* restrict room, const int room_size, const int images, const int groups, const int lanes,
    const int depth, const int rows, const int cols, const int height, const int width, const int kernel_h,
    const int kernel_w, const int stride_h, const int stride_w, const int dilation_h, const int dilation_w,
    const int top, const int left, const int image_block, const int row_block,
    const int block_chunk, const int tile_chunk, const int parts) {
  const int blocks = (lanes + COLS - 1) / COLS, tiles = (depth + DEPTH_TILE - 1) / DEPTH_TILE;
  const int tiles_w = (kernel_w * DEPTH_TILE + SUMS - 1) / SUMS;
  const int block_chunks = (blocks + block_chunk - 1) / block_chunk, tile_chunks = (tiles + tile_chunk - 1) / tile_chunk;
  const int row_blocks = (rows + row_block - 1) / row_block, image_blocks = (images + image_block - 1) / image_block;
  const int steps = row_blocks * image_blocks, plane = height * width, tap_col = dilation_w * DEPTH_TILE;
  const int x_size = images * groups * depth * plane, dy_size = images * groups * lanes * rows * cols;
  __global float* dy_room = room + (int)get_global_id(0) * room_size;
  __global float* x_room = dy_room + block_chunk * DY_PANEL;
  __global float* spare = x_room + tile_chunk * X_PANEL;
  for (int unit = get_global_id(0); unit < parts * groups * block_chunks * tile_chunks; unit += get_global_size(0)) {
    const int tile0 = unit % tile_chunks * tile_chunk, tile1 = min(tile0 + tile_chunk, tiles);
    const int block0 = unit / tile_chunks % block_chunks * block_chunk, block1 = min(block0 + block_chunk, blocks);
    const int group = unit / tile_chunks / block_chunks % groups, part = unit / tile_chunks / block_chunks / groups;
    const int step0 = part * steps / parts, step1 = (part + 1) * steps / parts;
    for (int step = step0; step < step1; step++) {
      const int image0 = step / row_blocks * image_block, image_count = min(images - image0, image_block);
      const int row0 = step % row_blocks * row_block, row_count = min(rows - row0, row_block);
      for (int image = 0; image < image_count; image++) {
        for (int block = block0; block < block1; block++) {
          for (int l0 = 0; l0 < COLS; l0 += LANES) {
            const int lane = block * COLS + l0;
            const int from = (((image0 + image) * groups + group) * lanes + lane) * rows * cols + row0 * cols;
            pack_lanes(dy + from, rows * cols, row_count * cols, dy_size - from, spare, COLS,
                       dy_room + (block - block0) * DY_PANEL + image * row_block * cols * COLS + l0);
          }
        }
        for (int tile = tile0; tile < tile1; tile++) {
          const int d = tile * DEPTH_TILE, from = (((image0 + image) * groups + group) * depth + d) * plane;
          pack_image(x + from, plane, x_size - from, spare, height, width, row0 * stride_h - top,
                     left, (row_count - 1) * stride_h + (kernel_h - 1) * dilation_h + 1, X_COLS,
                     x_room + (tile - tile0) * X_PANEL + image * X_ROWS * X_COLS * DEPTH_TILE);
        }
      }
      for (int block = block0; block < block1; block++) {
        for (int tap = 0; tap < kernel_h; tap++) {
          int row_begin = 0, row_end = row_count;  // rows that read the image at this tap; the border is zero
          const int first = row0 * stride_h - top + tap * dilation_h;
          while (row_begin < row_end && first + row_begin * stride_h < 0) row_begin++;
          while (row_begin < row_end && first + (row_end - 1) * stride_h >= height) row_end--;
          for (int tile = tile0; tile < tile1; tile++) {
            for (int w = 0; w < tiles_w; w++) {
              const int j = min(w * SUMS, kernel_w * DEPTH_TILE - SUMS);
              const int at = ((part * groups + group) * blocks + block) * kernel_h + tap;
              for (int lane = 0; lane < COLS; lane += VECTORS * LANES)
                add_tile(x_room + (tile - tile0) * X_PANEL + tap * dilation_h * X_COLS * DEPTH_TILE +
                             j / DEPTH_TILE * tap_col + j % DEPTH_TILE,
                         dy_room + (block - block0) * DY_PANEL + lane,
                         sums + ((at * tiles + tile) * tiles_w + w) * SUMS * COLS + lane, step > step0, image_count,
                         row_begin, row_end, cols, X_ROWS * X_COLS * DEPTH_TILE, stride_h * X_COLS * DEPTH_TILE,
                         stride_w * DEPTH_TILE, tap_col, row_block * cols * COLS);
            }
          }
        }
      }
    }
  }
}

// Adds the parts of the sums to dw.
// global size: chunks of 16 weights of an output channel, blocks of 16 lanes, groups
WORK_ITEM __kernel void weight_result(__global const float* restrict sums, __global float* restrict dw,
                                      const int groups, const int lanes, const int depth, const int kernel_h,
                                      const int kernel_w, const int parts) {
  const int blocks = (lanes + COLS - 1) / COLS, tiles = (depth + DEPTH_TILE - 1) / DEPTH_TILE;
  const int tiles_w = (kernel_w * DEPTH_TILE + SUMS - 1) / SUMS, weights = depth * kernel_h * kernel_w;
  const int first = get_global_id(0) * LANES, lane0 = get_global_id(1) * LANES, group = get_global_id(2);
  const int count = min(weights - first, LANES);
  float tile[LANES * LANES];
  for (int i = 0; i < LANES; i++) {
    float16 sum = (float16)(0.0f);
    const int d = (first + i) / (kernel_h * kernel_w), tap = (first + i) / kernel_w % kernel_h;
    const int j = (first + i) % kernel_w * DEPTH_TILE + d % DEPTH_TILE, w = j / SUMS;
    const int m = j - min(w * SUMS, kernel_w * DEPTH_TILE - SUMS);
    for (int part = 0; part < (i < count ? parts : 0); part++) {
      const int at = ((part * groups + group) * blocks + lane0 / COLS) * kernel_h + tap;
      sum += vload16(0, sums + (((at * tiles + d / DEPTH_TILE) * tiles_w + w) * SUMS + m) * COLS + lane0 % COLS);
    }
    vstore16(sum, i, tile);
  }
  transpose16(tile);
  for (int i = 0; i < min(lanes - lane0, LANES); i++)
    store_upto(vload16(i, tile), dw + (group * lanes + lane0 + i) * weights + first, count);
}
