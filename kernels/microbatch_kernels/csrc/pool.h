/* How the pools of K/V keep their numbers: [block][offset][kv_head][dim], in 8 bits with a scale for each token and
 * head, [block][offset][kv_head]. See quantized_kv.py. */
#pragma once

#include "vector.h"

enum kind { FLOAT32, INT8, FP8 };
