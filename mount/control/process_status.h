// SPDX-License-Identifier: Apache-2.0
//
// The status of this process: its version, age, memory, descriptors and processor time.
//
// Thread safety: pure function of what the kernel says.
// Units: bytes; seconds, times since 1970.

#pragma once

#include <nlohmann/json_fwd.hpp>

namespace ckptfs {

// {"version", "start_time_seconds", "cpu_seconds", "resident_bytes", "open_fds", "max_fds"}; what
// the kernel does not tell is left out.
nlohmann::json ProcessJson();

}  // namespace ckptfs
