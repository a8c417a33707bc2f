// 3x3 convolution of stride 1 by minimal filtering, F(4x4, 3x3), on CPUs: 36 products for 16 outputs instead of 144.
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016).
//
//   x        row-major [N][depth][height][width]; a tile of 6x6 pixels begins every 4 pixels
//   w        3x3 weights, row-major
//   weights  [36][block][depth][COLS]         transformed, by blocks of output channels
//   inputs   [36][tiles][depth_stride]        transformed, for the tile rows of this turn
//   products [tiles][36][lane_stride]         inputs times weights
//   y        row-major [N][lanes][height][width]
//
// A tile row is a row of tiles in one image; tile rows are counted through all images.
//
// The points of interpolation are 0, +-R, +-2R and infinity, with R = sqrt(1/2): pairs of opposite points share half of
// their sums, and 2R = 1/R balances the powers. With the usual 0, +-1, +-2 the largest error is 4 to 5 times as large.
// Measured against float64 on random inputs, for the convolutions of VGG-16 and ResNet-50, the largest error is 1.7e-6 to
// 4.8e-6 of the largest output. The direct kernel has 0.9e-6 to 3.3e-6; the bound of a sum, 16 sqrt(9 depth) eps, is 46e-6
// to 130e-6. The outputs of a tile share errors: small outputs have the errors of large ones in their tile, and a pixel that
// is not finite may turn all 16 outputs of a tile that reads it into NaN.

#define POINTS 36
#define CHUNK 32  // input channels whose weights are transformed at once for few tiles
#define SIDE 4
#define SPAN 7  // tiles side by side that are read together: 7 * SIDE + 2 pixels of the STRIP
#define STRIP (2 * LANES)
#define GROUP 4  // tiles side by side that are stored together: GROUP * SIDE = LANES pixels
#define R 0.70710678118654752f
#define ALIGNED __attribute__((aligned(64)))

// Prefetches the line at `p`.
#ifdef NO_PREFETCH
#define PREFETCH(p)
#else
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
#endif

// B^T d of a row or column.
inline void transform_input(const float16 d[6], float16 out[6]) {
  const float16 even_1 = d[4] - 2.0f * d[2], odd_1 = d[3] - 2.0f * d[1];
  const float16 even_2 = d[4] - 0.5f * d[2], odd_2 = d[3] - 0.5f * d[1];
  out[0] = d[0] - 2.5f * d[2] + d[4];
  out[1] = even_1 + R * odd_1;
  out[2] = even_1 - R * odd_1;
  out[3] = even_2 + 2 * R * odd_2;
  out[4] = even_2 - 2 * R * odd_2;
  out[5] = d[1] - 2.5f * d[3] + d[5];
}

// G g.
inline void transform_weights(const float16 g[3], float16 out[6]) {
  const float16 even_1 = (g[0] + 0.5f * g[2]) * (-2.0f / 3.0f), odd_1 = g[1] * (-2.0f / 3.0f * R);
  const float16 even_2 = (g[0] + 2.0f * g[2]) * (1.0f / 6.0f), odd_2 = g[1] * (R / 3.0f);
  out[0] = g[0];
  out[1] = even_1 + odd_1;
  out[2] = even_1 - odd_1;
  out[3] = even_2 + odd_2;
  out[4] = even_2 - odd_2;
  out[5] = g[2];
}

// A^T m.
inline void transform_output(const float16 m[6], float16 out[4]) {
  const float16 sum_1 = m[1] + m[2], difference_1 = m[1] - m[2];
  const float16 sum_2 = m[3] + m[4], difference_2 = m[3] - m[4];
  out[0] = m[0] + sum_1 + sum_2;
  out[1] = R * difference_1 + 2 * R * difference_2;
  out[2] = 0.5f * sum_1 + 2.0f * sum_2;
  out[3] = 0.5f * R * difference_1 + (4 * R * difference_2 + m[5]);
}

// Transforms 3x3 weights at w[lane * lane_stride + d * depth_stride], `size` floats in all, for the lanes from lane0 on and
// d0 <= d < d1; with `flipped`, their taps are reversed. The weights of successive points are `point` floats apart.
inline void transform_block(__global const float* w, __global float* weights, const int point, const int size,
                            const int lane_stride, const int depth_stride, const int lane0, const int lanes,
                            const int d0, const int d1, const int flipped) {
  for (int d = d0; d < d1; d++) {
    for (int base = 0; base < COLS; base += LANES) {
      float taps[LANES * LANES] ALIGNED;  // 9 per lane in use: it is harmless to read the weights after them
      for (int i = 0; i < LANES; i++) {
        const int lane = lane0 + base + i, at = lane * lane_stride + d * depth_stride;
        vstore16(lane < lanes ? load_upto(w + at, size - at) : (float16)(0.0f), i, taps);
      }
      transpose16(taps);
      float16 columns[18];
#pragma unroll
      for (int j = 0; j < 3; j++) {
        float16 g[3], out[6];
#pragma unroll
        for (int i = 0; i < 3; i++) g[i] = vload16(flipped ? 8 - 3 * i - j : 3 * i + j, taps);
        transform_weights(g, out);
#pragma unroll
        for (int i = 0; i < 6; i++) columns[3 * i + j] = out[i];
      }
#pragma unroll
      for (int i = 0; i < 6; i++) {
        float16 out[6];
        transform_weights(columns + 3 * i, out);
#pragma unroll
        for (int j = 0; j < 6; j++) vstore16(out[j], 0, weights + (6 * i + j) * point + (d - d0) * COLS + base);
      }
    }
  }
}

// global size: blocks from `first_block` on, chunks of 16 d
WORK_ITEM __kernel void winograd_weights(__global const float* restrict w, __global float* restrict weights,
                                         const int size, const int lane_stride, const int depth_stride,
                                         const int lanes, const int depth, const int flipped, const int first_block) {
  const int block = get_global_id(0), d0 = get_global_id(1) * LANES;
  transform_block(w, weights + (block * depth + d0) * COLS, (int)get_global_size(0) * depth * COLS, size, lane_stride,
                  depth_stride, (first_block + block) * COLS, lanes, d0, min(d0 + LANES, depth), flipped);
}

// Loads 16 pixels of 16 channels, channels last; the pixels before `first` and from `last` on are zero.
inline void load_pixels(__global const float* x, const int at, const int plane, const int size, const int first,
                        const int last, const int ahead, float* pixels) {
  const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  if (at >= 0 && at + (LANES - 1) * plane + LANES <= size) {  // it is harmless to read pixels around them
    const int16 mask = lane >= first && lane < last;
    float16 r[LANES];
    if (ahead > 0)
      for (int c = 0; c < LANES; c++) PREFETCH(x + at + c * plane + ahead);
#pragma unroll
    for (int c = 0; c < LANES; c++) r[c] = as_float16(as_int16(vload16(0, x + at + c * plane)) & mask);
    transpose_rows(r);
#pragma unroll
    for (int c = 0; c < LANES; c++) vstore16(r[c], c, pixels);
  } else {
    for (int i = 0; i < LANES; i++)
      for (int c = 0; c < LANES; c++) pixels[i * LANES + c] = i >= first && i < last ? x[at + c * plane + i] : 0.0f;
  }
}

// Transforms tiles side by side, of 16 channels; the first input pixel of the first tile is (top, left).
// global size: tile rows of the turn, chunks of 16 channels
WORK_ITEM __kernel void winograd_input(__global const float* restrict x, __global float* restrict inputs,
                                       const int images, const int depth, const int height, const int width,
                                       const int top, const int left, const int first_row, const int tile_rows,
                                       const int tile_cols, const int depth_stride) {
  const int own_row = get_global_id(0), row = first_row + own_row, image = row / tile_rows;
  const int c0 = min((int)get_global_id(1) * LANES, depth - LANES);
  const int point = (int)get_global_size(0) * tile_cols * depth_stride;
  const int plane = height * width, size = images * depth * plane;
  const int h0 = top + row % tile_rows * SIDE;
  inputs += own_row * tile_cols * depth_stride + c0;
  for (int tile = 0; tile < tile_cols; tile += SPAN) {
    const int count = min(tile_cols - tile, SPAN);
    float strip[6 * STRIP * LANES] ALIGNED;  // [row][column][channel]
    for (int i = 0; i < 6; i++) {
      const int h = h0 + i;
      for (int run = 0; run < (count * SIDE + 2 + LANES - 1) / LANES; run++) {
        float* pixels = strip + (i * STRIP + run * LANES) * LANES;
        const int w = left + tile * SIDE + run * LANES, at = (image * depth + c0) * plane + h * width + w;
        const int last = h >= 0 && h < height ? width - w : 0;
        load_pixels(x, at, plane, size, -w, last, i < 2 ? 0 : SIDE * width, pixels);
      }
    }
    for (int w = 0; w < count * SIDE + 2; w++) {
      float* column = strip + w * LANES;
      float16 d[6], out[6];
#pragma unroll
      for (int i = 0; i < 6; i++) d[i] = vload16(i * STRIP, column);
      transform_input(d, out);
#pragma unroll
      for (int i = 0; i < 6; i++) vstore16(out[i], i * STRIP, column);
    }
    for (int t = 0; t < count; t++) {
      for (int i = 0; i < 6; i++) {
        const float* row = strip + (i * STRIP + t * SIDE) * LANES;
        float16 d[6], out[6];
#pragma unroll
        for (int j = 0; j < 6; j++) d[j] = vload16(j, row);
        transform_input(d, out);
#pragma unroll
        for (int j = 0; j < 6; j++) vstore16(out[j], 0, inputs + (6 * i + j) * point);
      }
      inputs += depth_stride;
    }
  }
}

// `tiles` is at least FEW; the last tiles may overlap the previous ones.
// global size: blocks from `first_block` on (`weights` has only these), POINTS
WORK_ITEM __kernel void winograd_multiply(__global const float* restrict inputs, __global const float* restrict weights,
                                          __global float* restrict products, const int tiles, const int depth,
                                          const int depth_stride, const int lane_stride, const int first_block) {
  const int block = get_global_id(0), point = get_global_id(1), out_stride = POINTS * lane_stride;
  weights += (point * (int)get_global_size(0) + block) * depth * COLS;
  inputs += point * tiles * depth_stride;
  products += point * lane_stride + (first_block + block) * COLS;
  multiply_panel(inputs, depth_stride, weights, COLS, tiles, depth, products, out_stride, false);
}

// Transforms weights and multiplies, for few tiles, a multiple of FEW: transformed weights stay in a second-level cache.
// global size: work-items, each with POINTS * CHUNK * COLS floats of `room`; they take blocks in turn
WORK_ITEM __kernel void winograd_multiply_few(__global const float* restrict inputs, __global const float* restrict w,
                                              __global float* restrict products, __global float* restrict room,
                                              const int size, const int w_lane_stride, const int w_depth_stride,
                                              const int lanes, const int flipped, const int tiles, const int depth,
                                              const int depth_stride, const int lane_stride) {
  room += (int)get_global_id(0) * POINTS * CHUNK * COLS;
  for (int lane0 = (int)get_global_id(0) * COLS; lane0 < lanes; lane0 += (int)get_global_size(0) * COLS) {
    for (int d0 = 0; d0 < depth; d0 += CHUNK) {
      const int d1 = min(d0 + CHUNK, depth);
      transform_block(w, room, CHUNK * COLS, size, w_lane_stride, w_depth_stride, lane0, lanes, d0, d1, flipped);
      for (int point = 0; point < POINTS; point++)
        multiply_panel(inputs + point * tiles * depth_stride + d0, depth_stride, room + point * CHUNK * COLS, COLS, tiles,
                       d1 - d0, products + point * lane_stride + lane0, POINTS * lane_stride, d0 > 0);
    }
  }
}

// Stores the first `count` lanes, four at a time.
inline void store_quads(const float16 value, __global float* p, const int count) {
  if (count >= LANES) {
    vstore16(value, 0, p);
  } else {
    float lane[LANES];
    vstore16(value, 0, lane);
    int i = 0;
    for (; i + 4 <= count; i += 4) vstore4(vload4(0, lane + i), 0, p + i);
    for (; i < count; i++) p[i] = lane[i];
  }
}

// global size: tile rows of the turn, chunks of 16 lanes
WORK_ITEM __kernel void winograd_output(__global const float* restrict products, __global const float* restrict bias,
                                        const int has_bias, __global float* restrict y, const int first_row,
                                        const int tile_rows, const int tile_cols, const int lanes,
                                        const int lane_stride, const int height, const int width) {
  const int own_row = get_global_id(0), row = first_row + own_row, h = row % tile_rows * 4;
  const int c0 = get_global_id(1) * LANES, channels = min(lanes - c0, LANES), rows = min(height - h, 4);
  const float16 shift = has_bias ? load_upto(bias + c0, channels) : (float16)(0.0f);
  products += own_row * tile_cols * POINTS * lane_stride + c0;
  y += (row / tile_rows * lanes + c0) * height * width + h * width;
  float stage[LANES * 4 * GROUP * 4] ALIGNED;  // [channel][row][column]
  for (int tile = 0; tile < tile_cols; tile += GROUP) {
    for (int side = 0; side < min(GROUP, tile_cols - tile); side++) {
      float16 columns[24], pixels[LANES];
#pragma unroll
      for (int j = 0; j < 6; j++) {
        float16 m[6], out[4];
#pragma unroll
        for (int i = 0; i < 6; i++) m[i] = vload16(0, products + (6 * i + j) * lane_stride);
        transform_output(m, out);
#pragma unroll
        for (int i = 0; i < 4; i++) columns[6 * i + j] = out[i];
      }
#pragma unroll
      for (int i = 0; i < 4; i++) transform_output(columns + 6 * i, pixels + 4 * i);
#pragma unroll
      for (int p = 0; p < LANES; p++) pixels[p] += shift;
      transpose_rows(pixels);
#pragma unroll
      for (int c = 0; c < LANES; c++) {
        float* at = stage + c * 64 + side * 4;
        vstore4(pixels[c].lo.lo, 0, at);
        vstore4(pixels[c].lo.hi, 0, at + 16);
        vstore4(pixels[c].hi.lo, 0, at + 32);
        vstore4(pixels[c].hi.hi, 0, at + 48);
      }
      products += POINTS * lane_stride;
    }
    const int w = tile * 4, count = min(width - w, GROUP * 4);
    for (int c = 0; c < channels; c++)
      for (int i = 0; i < rows; i++)
        store_quads(vload16(c * 4 + i, stage), y + (c * height + i) * width + w, count);
  }
}
