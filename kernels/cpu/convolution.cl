// Direct two-dimensional convolution on CPUs, from the copies that layout.cl makes.
//
//   padded  [N][rows][cols][C]   packed  [group][block][kernel_h * kernel_w][depth][COLS]   y  row-major [N][C][H][W]
//
// PIXELS x COLS sums stay in registers while taps and input channels stream through; the PIXELS are a box of
// TILE_IMAGES x TILE_ROWS x TILE_COLS output pixels. The same kernel computes the input gradient, from dy with other taps
// (see ops/convolution.py).

#define PIXELS (TILE_IMAGES * TILE_ROWS * TILE_COLS)
#define COLS 32
// Image, row and column of pixel p in the box.
#define IMAGE(p) ((p) / (TILE_ROWS * TILE_COLS))
#define ROW(p) ((p) / TILE_COLS % TILE_ROWS)
#define COL(p) ((p) % TILE_COLS)
#define PLACE(p, image, row, col) (IMAGE(p) * (image) + ROW(p) * (row) + COL(p) * (col))

// Stores 16 channels of the box, tile[pixel][channel] -> y. (skip_*: leading part of the box that another work-item owns.)
inline void store_tile(float* tile, __global float* y, const int channels, const int y_image, const int y_channel,
                       const int y_row, const int y_col, const int skip_image, const int skip_row,
                       const int skip_col) {
  transpose16(tile);
  const bool whole = skip_image + skip_row + skip_col == 0;
  for (int c = 0; c < min(channels, LANES); c++) {
    const float* lane = tile + c * LANES;
    if (whole && y_col == 1 && TILE_COLS % 4 == 0) {
#pragma unroll
      for (int p = 0; p < PIXELS; p += 4) vstore4(vload4(0, lane + p), 0, y + PLACE(p, y_image, y_row, 1));
    } else if (whole) {
#pragma unroll
      for (int p = 0; p < PIXELS; p++) y[PLACE(p, y_image, y_row, y_col)] = lane[p];
    } else {
      for (int p = 0; p < PIXELS; p++)
        if (IMAGE(p) >= skip_image && ROW(p) >= skip_row && COL(p) >= skip_col)
          y[PLACE(p, y_image, y_row, y_col)] = lane[p];
    }
    y += y_channel;
  }
}

// y = bias + sum over taps and d of padded * packed. Offsets into `padded` are in floats: x_image per image,
// x_row and x_col per output row and column, tap_row and tap_col per tap; `packed` likewise by w_row and w_col per tap.
// Output row 0 reads input row first_row at tap 0; row_step and tap_step are the steps per output row and per tap. Taps in
// the border are skipped.
// global size: tiles in an image, tiles of images, groups * blocks. With `blocks_first` the last dimension comes first, since
// its neighbours share the pixels of a tile
WORK_ITEM __kernel void convolve(__global const float* restrict padded, __global const float* restrict packed,
                                 __global const float* restrict bias, const int has_bias, __global float* restrict y,
                                 const int images, const int rows, const int cols, const int depth,
                                 const int channels, const int blocks, const int taps_h, const int taps_w,
                                 const int x_offset, const int x_image, const int x_row, const int x_col,
                                 const int tap_row, const int tap_col, const int first_row,
                                 const int row_step, const int tap_step, const int height, const int kernel_size,
                                 const int w_offset, const int w_row, const int w_col, const int y_offset, const int y_image,
                                 const int y_channel, const int y_row, const int y_col, const int blocks_first) {
  const int col_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
  const int block = get_global_id(blocks_first ? 0 : 2), tile_at = get_global_id(blocks_first ? 1 : 0);
  const int own_image = get_global_id(blocks_first ? 2 : 1) * TILE_IMAGES, image = min(own_image, images - TILE_IMAGES);
  const int own_col = tile_at % col_tiles * TILE_COLS, col = min(own_col, cols - TILE_COLS);
  const int own_row = tile_at / col_tiles * TILE_ROWS, row = min(own_row, rows - TILE_ROWS);
  const int group = block / blocks, c0 = block % blocks * COLS;
  float16 lo[PIXELS], hi[PIXELS];
  const float16 bias_lo = has_bias ? load_upto(bias + group * channels + c0, channels - c0) : (float16)(0.0f);
  const float16 bias_hi =
      has_bias ? load_upto(bias + group * channels + c0 + LANES, channels - c0 - LANES) : (float16)(0.0f);
#pragma unroll
  for (int m = 0; m < PIXELS; m++) {
    lo[m] = bias_lo;
    hi[m] = bias_hi;
  }
  packed += block * kernel_size * depth * COLS + w_offset;
  __global const float* origin = padded + x_offset + group * depth + image * x_image + row * x_row + col * x_col;
  for (int th = 0; th < taps_h; th++) {
    const int top = first_row + row * row_step + th * tap_step, bottom = top + (TILE_ROWS - 1) * row_step;
    if (bottom < 0 || top >= height) continue;
    for (int tw = 0; tw < taps_w; tw++) {
      __global const float* w = packed + th * w_row + tw * w_col;
      __global const float* x[PIXELS / TILE_COLS];
#pragma unroll
      for (int i = 0; i < PIXELS / TILE_COLS; i++)
        x[i] = origin + th * tap_row + tw * tap_col + i / TILE_ROWS * x_image + i % TILE_ROWS * x_row;
      for (int d = 0; d < depth; d++) {
        const float16 w_lo = vload16(0, w), w_hi = vload16(1, w);
#pragma unroll
        for (int m = 0; m < PIXELS; m++) {
          const float value = x[m / TILE_COLS][d + m % TILE_COLS * x_col];
          lo[m] = fma((float16)(value), w_lo, lo[m]);
          hi[m] = fma((float16)(value), w_hi, hi[m]);
        }
        w += COLS;
      }
    }
  }
  y += y_offset + image * y_image + (group * channels + c0) * y_channel + row * y_row + col * y_col;
  float tile[2][LANES * LANES];
#pragma unroll
  for (int m = 0; m < PIXELS; m++) {
    vstore16(lo[m], m, tile[0]);
    vstore16(hi[m], m, tile[1]);
  }
  for (int m = PIXELS; m < LANES; m++) {
    vstore16((float16)(0.0f), m, tile[0]);
    vstore16((float16)(0.0f), m, tile[1]);
  }
  for (int i = 0; i < 2; i++)
    store_tile(tile[i], y + i * LANES * y_channel, channels - c0 - i * LANES, y_image, y_channel, y_row, y_col,
               own_image - image, own_row - row, own_col - col);
}
