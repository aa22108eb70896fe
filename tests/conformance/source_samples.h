// SPDX-License-Identifier: Apache-2.0
//
// Small checkpoints of every source's format, written where a test may spoil
// them: the tiny real one, universal views made of it, one whose tensors are
// larger than memory (holes), and the fake source's.
//
// Thread safety: pure but for writing files.

#pragma once

#include <string>
#include <vector>

namespace ckptfs {

struct SourceSample {
  std::string save;                 // absolute; a save directory with one step
  std::string tag;                  // absolute; the step's own directory
  std::vector<std::string> needed;  // below tag: without one of them it is incomplete
};

// Each writes below `directory`, which is empty.
SourceSample WriteDeepSpeedGolden(const std::string& directory);
SourceSample WriteRankShards(const std::string& directory);         // of two ranks of FSDP2
SourceSample WriteUniversalOfGolden(const std::string& directory);  // a tp2 view, exported
SourceSample WriteUniversalOfTinyStep(const std::string& directory);
SourceSample WriteUniversalOfHoles(const std::string& directory);
// Stage 3, with a state of a parameter that has no folder.
SourceSample WriteUniversalWithoutAFolder(const std::string& directory);
SourceSample WriteHuggingFace(const std::string& directory);  // a Trainer's, in shards
// Two ranks: a weight cut along dim 0, and a whole one.
SourceSample WriteDcp(const std::string& directory);
// torch_dist of two ranks, of a core up to 0.18: layers in one tensor, the job's arguments.
SourceSample WriteMegatron(const std::string& directory);
SourceSample WriteMegatronLegacy(const std::string& directory);
SourceSample WriteFake(const std::string& directory);

}  // namespace ckptfs
