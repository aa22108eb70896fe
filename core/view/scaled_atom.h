// SPDX-License-Identifier: Apache-2.0
//
// ReadScaled decodes values that are stored with a scale per block: fp8 weights with
// `weight_scale_inv` (DeepSeek) and MXFP4 (gpt_oss).
//
//   shown = cast(float(value) * float(scale of its block)), the product in fp32
//
// This is what transformers 5.23 does (Fp8Dequantize of integrations/finegrained_fp8.py,
// convert_moe_packed_tensors of integrations/mxfp4.py).  An exponent of 255 (fp8_e8m0) is NaN, as
// the OCP's specification of microscaling formats says.
//
// Thread safety: pure apart from the blob reader.
// Units: elements of the target's local tensor.

#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/tensor/piece.h"
#include "core/view/stored_atom.h"

namespace ckptfs {

// The value of a stored number: fp8_e4m3, fp8_e8m0; of fp4 the lower four bits.
float DecodeFp8E4M3(uint8_t bits);
float DecodeFp8E8M0(uint8_t bits);
float DecodeFp4(uint8_t bits);

// Fills `out` with elements [begin, end) of `local`; those that no piece maps are zero.
// REQUIRES: a source of kind kScaled that CheckSource accepts.
// BLOCKS: on the device where the page cache is cold.
Status ReadScaled(BlobReader& blobs, const StoredAtom& stored, const LocalTensor& local,
                  uint64_t begin, uint64_t end, std::byte* out, uint32_t shown_width);

}  // namespace ckptfs
