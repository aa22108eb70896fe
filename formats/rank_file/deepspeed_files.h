// SPDX-License-Identifier: Apache-2.0
//
// Rank files of a DeepSpeed job.  They hold what DeepSpeed's own save would write: of
// each of its files the pickle, as torch.save makes it, and the storages, each a tensor
// of some rank's file.  So what reads a native checkpoint reads this, and the step is
// the one that such a checkpoint of the same moment would be.
//
//   document { key: file, scope: "file" }   the pickle; its storage k is "<file>/k"
//   document { key: file, scope: "part" }   storages of a file that another rank has
//   document { key: "tag", scope: "" }      of rank 0: a text, the directory's name
//
// Thread safety: pure function but for reading the files.
// Inputs are hostile: every refusal names the file and the rule.

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/root.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "formats/rank_file/rank_entry.h"

namespace ckptfs {

// The framework name of a rank file in this case.
inline constexpr std::string_view kDeepSpeedRankFile = "deepspeed";

struct OpenRankFile {
  const RankEntry* entry = nullptr;
  std::shared_ptr<const File> file;
  BlobIndex blob{};
};

// The step of all ranks' files, which lie in `directory` of the root and were added to
// the assembler.  BLOCKS: on reading pickles.
Result<StepModel> ReadDeepSpeedFiles(const std::shared_ptr<const Root>& root,
                                     const std::string& directory,
                                     const std::vector<OpenRankFile>& ranks,
                                     const SourceOptions& options, Assembler assembler);

}  // namespace ckptfs
