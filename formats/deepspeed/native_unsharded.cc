// SPDX-License-Identifier: Apache-2.0
//
// NativeReader: stage 0, where the optimizer lies in the model states file and
// knows its parameters by number only.

#include "formats/deepspeed/native_reader.h"

namespace ckptfs::deepspeed {

Status NativeReader::NameUnsharded() { return {}; }
Status NativeReader::PlaceUnsharded() { return {}; }

}  // namespace ckptfs::deepspeed
