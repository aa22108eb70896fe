// SPDX-License-Identifier: Apache-2.0
//
// TagFiles is one tag directory as its readers see it: the names of its files and
// the blobs that they are in the step.  Both readers, native and universal, begin
// with it.
//
// Thread safety: immutable once made.
// Lifetime: the assembler, the candidate and the options must outlive it.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/parallel.h"
#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "formats/deepspeed/names.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {

struct TagFiles {
  Assembler& assembler;  // registers the files, and is told the frame of each that is opened
  const StepCandidate& step;
  const SourceOptions& options;
  StepFiles names;
  std::map<std::string, BlobIndex, std::less<>> blobs;  // by path below the tag directory
  // Opens one where they are not files of their own (formats/rank_file); from any thread.
  std::function<Result<TorchFile>(std::string_view)> open_part;

  // For messages.
  std::string PathOf(std::string_view name) const;
  // BLOCKS: on reading the file's directory and pickle.  REQUIRES: it was registered.
  Result<TorchFile> Open(std::string_view name) const;
  // REQUIRES: the file was registered.
  BlobIndex BlobOf(std::string_view name) const;
};

// Adds the files of `order` (paths below the tag directory) to the step, in that
// order.  BLOCKS: on reading each for its fingerprint.
Result<TagFiles> Register(const StepCandidate& step, const SourceOptions& options, StepFiles names,
                          const std::vector<std::string>& order, Assembler& assembler);

// The names that ListStep found, kind by kind; in dp order within one, so that
// fragments form series.
std::vector<std::string> NamesInOrder(const StepFiles& names);

// read(const TorchFile&, BlobIndex, const Key&) -> Result<Value> of every file,
// on TBB's threads; the first error in the order of `names` wins.
template <class Key, class Read>
auto ReadEach(const TagFiles& files, const std::map<Key, std::string>& names, const Read& read) {
  using Value =
      typename std::invoke_result_t<Read, const TorchFile&, BlobIndex, const Key&>::value_type;
  std::map<Key, Value> out;
  std::vector<std::pair<const std::pair<const Key, std::string>*, Value*>> jobs;
  jobs.reserve(names.size());
  for (const auto& entry : names) jobs.emplace_back(&entry, &out[entry.first]);
  std::vector<Status> outcomes(jobs.size());
  ParallelFor(jobs.size(), [&](size_t i) {
    const auto& [entry, into] = jobs[i];
    const auto work = [&, &name = entry->second, &key = entry->first, into = into]() -> Status {
      CKPT_ASSIGN_OR_RETURN(const TorchFile file, files.Open(name));
      CKPT_ASSIGN_OR_RETURN(*into, read(file, files.BlobOf(name), key));
      return {};
    };
    outcomes[i] = work();
  });
  for (Status& outcome : outcomes) {
    if (!outcome) return Result<std::map<Key, Value>>(Fail(std::move(outcome).error()));
  }
  return Result<std::map<Key, Value>>(std::move(out));
}

// Appends those of `other` that `first` does not have alike, under their scope.
void AddOtherDocuments(const std::vector<Document>& first, const std::vector<Document>& other,
                       const std::string& scope, std::vector<Document>& documents);

}  // namespace ckptfs::deepspeed
