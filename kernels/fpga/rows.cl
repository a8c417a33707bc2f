// A kernel over whole rows of a product, joined to its dataflow:  store  --row_stream-->  normalise
//
// It keeps a strip of TILE_ROWS rows in block RAM until all their columns have arrived, then runs NORMALISE of the file before
// this one. Loops over rows are innermost: additions to a row's sum are TILE_ROWS cycles apart. Rows have at most ROW_COLS
// columns. A file that keeps other data defines STRIP (its declarations) and TAKE(vector) (its use of vector `at` of a tile).
//
//   stream       vectors in a tile               floats      sent by  received by
//   row_stream   TILE_ROWS * INTERLEAVE_COLS     ARRAY_COLS  store    normalise
//
// The sheet, as in dataflow.cl:
//
//   normalise      1                197120              1                   0
//   normalise      1                164160              1                   4                       (of batch_norm.cl)

#define EACH_ROW for (int r = 0; r < TILE_ROWS; r++)
#define EACH_COL for (int j = 0; j < cols; j++)
#define ROW_NUMBER (batch * rows + row0 + r)
#define IN_C (row0 + r < rows)

#define KEEP(element, value) lanes[lane] = STORE(element, value)
#ifndef TAKE
#define STRIP __local float strip[TILE_ROWS][ROW_COLS]
#define ROW_PLACE (strip[ROW_AT] + col0 + at % INTERLEAVE_COLS * ARRAY_COLS)
#define TAKE(vector) STORE_B(vector, 0, ROW_PLACE);
#endif
#define FINISH_ROWS if (col0 + TILE_COLS >= cols) { NORMALISE }

#ifdef CHANNELS
channel b_vector row_stream __attribute__((depth(CAPACITY)));
#define SEND_ROWS SEND(row_stream, LOAD_B(0, lanes));
#define RECEIVE_ROWS TAKE(RECEIVE(row_stream))

SINGLE __kernel void normalise(PROBLEM, ROW_ARGUMENTS) {
  STRIP;
  EACH_TILE
    EACH_VECTOR RECEIVE_ROWS END
    FINISH_ROWS
  END
}
#else
#define SEND_ROWS
#define RECEIVE_ROWS TAKE(LOAD_B(0, lanes))
#endif
