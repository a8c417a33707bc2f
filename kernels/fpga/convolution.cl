// The forward of convolutions on FPGAs: y[co][image and pixel] = w[co][tap] x[tap][image and pixel], a batch for each group.

#define OPERANDS __global const float* restrict x, __global const float* restrict w
#define BIAS __global const float* restrict bias, const int has_bias

#define K_PLACE(k) TAP_PLACE(k) + (int4)(0, 0, 0, k)
#define COL_PLACE(col) window_place(col, OUT_PIXELS, out_width, in_channels, group * CHANNELS_IN, STRIDE, PAD)
#define A(row, k) w[(group * LANES + (row)) * CHANNELS_IN * TAPS + (k).w]
#define B(k, col) x_at(x, (col).x + (k).x, (col).y + (k).y, (col).z + (k).z, height, width)
#define A_ALONG_K true
#define B_ALONG_K false
#define FINISH(row, col, sum)                                                            \
  const int number = group * LANES + (row);                                              \
  KEEP(((col) / OUT_PIXELS * out_channels + number) * OUT_PIXELS + (col) % OUT_PIXELS,   \
        has_bias ? (sum) + bias[number] : (sum));

#ifdef CHANNELS
SINGLE __kernel void convolution_load(OPERANDS, SHAPE, PROBLEM) { LOADS }
SINGLE __kernel void convolution_store(BIAS, SHAPE, PROBLEM, RESULTS) { STORES }
#else
SINGLE __kernel void convolution(OPERANDS, BIAS, SHAPE, PROBLEM, RESULTS) { WHOLE }
#endif
