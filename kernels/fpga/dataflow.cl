// Products as dataflows of single work-items, for FPGAs. Prepended to the family's other files.
//
//   load  --a_stream, b_stream-->  array  --c_stream-->  store         tile after tile, tiles row by row
//
//   C (TILE_ROWS x TILE_COLS)  +=  A (TILE_ROWS x depth)  B (depth x TILE_COLS)
//
// load   reads BLOCK steps of k into block RAM, LOAD_WIDTH floats a cycle, and sends them step by step.
// array  is a chain of ARRAY_ROWS processing elements. In a cycle, each multiplies a number of A with ARRAY_COLS numbers of B;
//        numbers of B pass from element to element through registers. An element adds to TURNS vectors of sums in turn. So
//        additions to one sum are TURNS cycles apart, and a turn begins in every cycle.
// store  receives the sums by rows and computes the epilogue. With ROWS it sends the results to another kernel (rows.cl).
//
// With CHANNELS each of the three is a kernel, and they run concurrently. Otherwise one kernel does their work in turn, and the
// streams are small arrays on the chip. Either way the same numbers are added in the same order: equal results, bit for bit.
//
//   stream     vectors in a tile                   floats      sent by  received by
//   a_stream   depth * INTERLEAVE_ROWS             ARRAY_ROWS  load     array
//   b_stream   depth * INTERLEAVE_COLS             ARRAY_COLS  load     array
//   c_stream   TILE_ROWS * INTERLEAVE_COLS         ARRAY_COLS  array    store
//
// A channel holds CAPACITY vectors. No capacity leads to a deadlock, not even 1. The kernels form no circle. Both ends of a
// stream run the same loops over tiles and steps, so they send and receive equally many vectors. If two streams join the same
// two kernels, both ends take them in the same order. So some kernel can always receive its vector or send one.
//
// Parameters (options of the build): ARRAY_ROWS 8, ARRAY_COLS 16, INTERLEAVE_ROWS 8, INTERLEAVE_COLS 8, BLOCK 32,
// CAPACITY 2048, LOAD_WIDTH 16. backends/opencl/fpga/sheet.py computes the hardware that these values need:
//
//   kernel         multiply-adds    block RAM, bytes    interval, cycles    bytes read in a cycle
//   matmul_load    0                27136               1                   64
//   array          128              229888              1                   0
//   matmul_store   32               131072              1                   0
//   matmul         160              61248               1                   64                       (without CHANNELS)

#define TILE_ROWS (ARRAY_ROWS * INTERLEAVE_ROWS)
#define TILE_COLS (ARRAY_COLS * INTERLEAVE_COLS)
#define TURNS (INTERLEAVE_ROWS * INTERLEAVE_COLS)

#define PASTED(a, b) a##b
#define NAMED(a, b) PASTED(a, b)
#define a_vector NAMED(float, ARRAY_ROWS)
#define b_vector NAMED(float, ARRAY_COLS)
#define LOAD_A NAMED(vload, ARRAY_ROWS)
#define LOAD_B NAMED(vload, ARRAY_COLS)
#define STORE_A NAMED(vstore, ARRAY_ROWS)
#define STORE_B NAMED(vstore, ARRAY_COLS)
#define PRAGMA(text) _Pragma(#text)
#define UNROLLED(n) PRAGMA(unroll n)

#ifdef CHANNELS
#pragma OPENCL EXTENSION cl_intel_channels : enable
#define SINGLE __attribute__((max_global_work_dim(0)))
#define SEND(stream, vector) write_channel_intel(stream, vector)
#define RECEIVE(stream) read_channel_intel(stream)
#define RESTART(stream)
#define REGISTER(x) __fpga_reg(x)
channel a_vector a_stream __attribute__((depth(CAPACITY)));
channel b_vector b_stream __attribute__((depth(CAPACITY)));
channel b_vector c_stream __attribute__((depth(CAPACITY)));
#else
#define SINGLE __attribute__((reqd_work_group_size(1, 1, 1)))
#define SEND(stream, vector) stream[stream##_sent++] = (vector)
#define RECEIVE(stream) stream[stream##_received++]
#define RESTART(stream) stream##_sent = stream##_received = 0
#define REGISTER(x) (x)
#define STREAM(type, stream, vectors) \
  type stream[vectors];               \
  int stream##_sent = 0, stream##_received = 0
#endif

// The loops of all kernels. `batch`, `row0`, `col0` give a tile, `k0` and `steps` a block of k, `k` a step in it; `at` counts
// the vectors of sums in a tile, in the order of its rows.
#define PROBLEM const int batches, const int rows, const int cols, const int depth
#define EACH_TILE                                      \
  for (int batch = 0; batch < batches; batch++)        \
    for (int row0 = 0; row0 < rows; row0 += TILE_ROWS) \
      for (int col0 = 0; col0 < cols; col0 += TILE_COLS) {
#define EACH_BLOCK                            \
  for (int k0 = 0; k0 < depth; k0 += BLOCK) { \
    const int steps = min(BLOCK, depth - k0);
#define EACH_STEP for (int k = 0; k < steps; k++) {
#define EACH_VECTOR for (int at = 0; at < TILE_ROWS * INTERLEAVE_COLS; at++) {
#define END }

// load: an operation defines its reads. COL_PLACE(col) and K_PLACE(k) are int4 that it computes once for a tile or block;
// A(row, place of k) and B(place of k, place of col) are elements. With A_ALONG_K or B_ALONG_K, k is contiguous in memory.
#define LOADER                                                           \
  __local float a_block[BLOCK][TILE_ROWS], b_block[BLOCK][TILE_COLS];    \
  int4 k_place[BLOCK], col_place[TILE_COLS]
#define LOAD_TILE for (int i = 0; i < TILE_COLS; i++) col_place[i] = COL_PLACE(col0 + i);
#define FILL(block, width, along_k, element)                                          \
  if (along_k) {                                                                      \
    for (int i = 0; i < width; i++)                                                   \
      UNROLLED(LOAD_WIDTH) for (int k = 0; k < steps; k++) block[k][i] = element;     \
  } else {                                                                            \
    for (int k = 0; k < steps; k++)                                                   \
      UNROLLED(LOAD_WIDTH) for (int i = 0; i < width; i++) block[k][i] = element;     \
  }
#define LOAD_BLOCK                                                                                   \
  for (int k = 0; k < steps; k++) k_place[k] = K_PLACE(k0 + k);                                      \
  FILL(a_block, TILE_ROWS, A_ALONG_K, row0 + i < rows ? A(row0 + i, k_place[k]) : 0.0f)              \
  FILL(b_block, TILE_COLS, B_ALONG_K, col0 + i < cols ? B(k_place[k], col_place[i]) : 0.0f)
#define SEND_STEP                                                                                    \
  RESTART(a_stream);                                                                                 \
  RESTART(b_stream);                                                                                 \
  for (int turn = 0; turn < TURNS; turn++) {                                                         \
    if (turn % INTERLEAVE_COLS == 0) SEND(a_stream, LOAD_A(turn / INTERLEAVE_COLS, a_block[k]));     \
    if (turn < INTERLEAVE_COLS) SEND(b_stream, LOAD_B(turn, b_block[k]));                            \
  }

// array
#define SUMS                                                  \
  b_vector sums[TURNS][ARRAY_ROWS], b_kept[INTERLEAVE_COLS];  \
  float a_now[ARRAY_ROWS]
#define CLEAR                              \
  for (int turn = 0; turn < TURNS; turn++) \
    UNROLLED(ARRAY_ROWS) for (int i = 0; i < ARRAY_ROWS; i++) sums[turn][i] = (b_vector)(0.0f);
#define MULTIPLY_STEP                                                             \
  for (int turn = 0; turn < TURNS; turn++) {                                      \
    if (turn % INTERLEAVE_COLS == 0) STORE_A(RECEIVE(a_stream), 0, a_now);        \
    if (turn < INTERLEAVE_COLS) b_kept[turn] = RECEIVE(b_stream);                 \
    b_vector passing = b_kept[turn % INTERLEAVE_COLS];                            \
    UNROLLED(ARRAY_ROWS) for (int i = 0; i < ARRAY_ROWS; i++) {                   \
      passing = REGISTER(passing);                                                \
      sums[turn][i] = fma((b_vector)(a_now[i]), passing, sums[turn][i]);          \
    }                                                                             \
  }
#define ROW_AT (at / INTERLEAVE_COLS)
#define DRAIN_VECTOR   \
  RESTART(c_stream);   \
  SEND(c_stream, sums[ROW_AT / ARRAY_ROWS * INTERLEAVE_COLS + at % INTERLEAVE_COLS][ROW_AT % ARRAY_ROWS]);

// store: runs FINISH(row, col, sum) for every element of C; FINISH ends with KEEP(element, value).
#ifndef ROWS
#define KEEP(element, value) STORE(element, value)
#define STRIP
#define SEND_ROWS
#define RECEIVE_ROWS
#define FINISH_ROWS
#endif
#define STORE_VECTOR                                                     \
  float lanes[ARRAY_COLS];                                               \
  STORE_B(RECEIVE(c_stream), 0, lanes);                                  \
  UNROLLED(ARRAY_COLS) for (int lane = 0; lane < ARRAY_COLS; lane++) {   \
    const int row = row0 + ROW_AT;                                       \
    const int col = col0 + at % INTERLEAVE_COLS * ARRAY_COLS + lane;     \
    if (row < rows && col < cols) { FINISH(row, col, lanes[lane]) }      \
  }                                                                      \
  SEND_ROWS

// The bodies of an operation's kernels.
#ifdef CHANNELS
#define LOADS LOADER; EACH_TILE LOAD_TILE EACH_BLOCK LOAD_BLOCK EACH_STEP SEND_STEP END END END
#define STORES EACH_TILE EACH_VECTOR STORE_VECTOR END END

SINGLE __kernel void array(PROBLEM) {
  SUMS;
  EACH_TILE
    CLEAR
    EACH_BLOCK EACH_STEP MULTIPLY_STEP END END
    EACH_VECTOR DRAIN_VECTOR END
  END
}
#else
#define WHOLE                                                               \
  LOADER;                                                                   \
  SUMS;                                                                     \
  STREAM(a_vector, a_stream, INTERLEAVE_ROWS);                              \
  STREAM(b_vector, b_stream, INTERLEAVE_COLS);                              \
  STREAM(b_vector, c_stream, 1);                                            \
  STRIP;                                                                    \
  EACH_TILE                                                                 \
    LOAD_TILE                                                               \
    CLEAR                                                                   \
    EACH_BLOCK LOAD_BLOCK EACH_STEP SEND_STEP MULTIPLY_STEP END END         \
    EACH_VECTOR DRAIN_VECTOR STORE_VECTOR RECEIVE_ROWS END                  \
    FINISH_ROWS                                                             \
  END
#endif
