// The weight gradient of convolutions on FPGAs: dw[co][tap] = dy[co][image and pixel] x[image and pixel][tap], a batch for each
// group.

#define OPERANDS __global const float* restrict dy, __global const float* restrict x

#define DY_OF(k) (((k) / OUT_PIXELS * out_channels + group * LANES) * OUT_PIXELS + (k) % OUT_PIXELS)
#define K_PLACE(k)                                                                             \
  window_place(k, OUT_PIXELS, out_width, in_channels, group * CHANNELS_IN, STRIDE, PAD) + \
      (int4)(0, 0, 0, DY_OF(k))
#define COL_PLACE(col) TAP_PLACE(col)
#define A(row, k) dy[(k).w + (row) * OUT_PIXELS]
#define B(k, col) x_at(x, (k).x + (col).x, (k).y + (col).y, (k).z + (col).z, height, width)
#define A_ALONG_K true
#define B_ALONG_K true
#define FINISH(row, col, sum) KEEP((group * LANES + (row)) * CHANNELS_IN * TAPS + (col), sum);

#ifdef CHANNELS
SINGLE __kernel void convolution_weight_load(OPERANDS, SHAPE, PROBLEM) { LOADS }
SINGLE __kernel void convolution_weight_store(SHAPE, PROBLEM, RESULTS) { STORES }
#else
SINGLE __kernel void convolution_weight(OPERANDS, SHAPE, PROBLEM, RESULTS) { WHOLE }
#endif
