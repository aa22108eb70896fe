// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_file/deepspeed_files.h"

#include <map>
#include <optional>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/deepspeed/native/placed.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxFilePickle = uint64_t{1} << 30;

struct StorageHome {
  size_t rank = 0;
  SafetensorsEntry entry;
};

// One of DeepSpeed's files.
struct SavedFile {
  std::optional<size_t> rank;  // the rank that has its pickle
  SafetensorsEntry pickle;
  std::map<std::string, StorageHome, std::less<>> storages;
};

class SavedFiles {
 public:
  explicit SavedFiles(const std::vector<OpenRankFile>& ranks) : ranks_(ranks) {}

  Status Collect();
  // BLOCKS: on reading its pickle.  REQUIRES: it is one of `names()`.
  Result<TorchFile> Open(std::string_view name) const;
  BlobIndex BlobOf(const SavedFile& file) const { return ranks_[*file.rank].blob; }
  const std::map<std::string, SavedFile, std::less<>>& files() const { return files_; }
  const std::string& tag() const { return tag_; }

 private:
  Status Take(size_t rank, const RankDocument& document);
  Status TakeTag(size_t rank, const RankDocument& document);
  Result<PickleTree> TreeOf(size_t rank, const SafetensorsEntry& entry) const;

  const std::vector<OpenRankFile>& ranks_;
  std::map<std::string, SavedFile, std::less<>> files_;
  std::string tag_;
};

Status SavedFiles::Collect() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankEntry& entry = *ranks_[rank].entry;
    if (entry.framework != kDeepSpeedRankFile)
      return Refuse("rank ", rank,
                    " is not a rank of a "
                    "DeepSpeed job");
    if (!entry.tensors.empty() || !entry.parameters.empty() || !entry.groups.empty()) {
      return Refuse("rank ", rank, " holds parameters beside DeepSpeed's files");
    }
    for (const RankDocument& document : entry.documents) {
      CKPT_RETURN_IF_ERROR(Take(rank, document));
    }
  }
  if (tag_.empty()) return Refuse("rank 0 does not name the tag");
  for (const auto& [name, file] : files_) {
    if (!file.rank) return Refuse("'", name, "' has storages, but no rank has its pickle");
  }
  return {};
}

Status SavedFiles::Take(size_t rank, const RankDocument& document) {
  if (document.scope.empty()) return TakeTag(rank, document);
  const bool part = document.scope == "part";
  if (!part && document.scope != "file") {
    return Refuse("'", document.key, "' has scope '", document.scope, "'");
  }
  SavedFile& file = files_[document.key];
  if (!part) {
    if (file.rank)
      return Refuse("ranks ", *file.rank, " and ", rank,
                    " both "
                    "have '",
                    document.key, "'");
    file.rank = rank;
    file.pickle = document.pickle;
  }
  const std::string prefix = document.key + "/";
  for (const SafetensorsEntry& entry : document.tensors) {
    if (!entry.name.starts_with(prefix)) {
      return Refuse("storage '", entry.name, "' does not belong to '", document.key, "'");
    }
    const std::string key = entry.name.substr(prefix.size());
    const auto [at, added] = file.storages.try_emplace(key, StorageHome{rank, entry});
    if (added) continue;
    return Refuse("ranks ", at->second.rank, " and ", rank,
                  " both have "
                  "storage '",
                  entry.name, "'");
  }
  return {};
}

Status SavedFiles::TakeTag(size_t rank, const RankDocument& document) {
  if (document.key != "tag" || rank != 0 || !document.tensors.empty()) {
    return Refuse("'", document.key, "' of rank ", rank, " does not belong in a DeepSpeed job");
  }
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, TreeOf(rank, document.pickle));
  const auto text = RootOf(tree).String();
  if (!text || !deepspeed::IsTagName(*text) || text->find('/') != std::string_view::npos) {
    return Refuse("the tag is not a directory's name");
  }
  tag_ = *text;
  return {};
}

Result<PickleTree> SavedFiles::TreeOf(size_t rank, const SafetensorsEntry& entry) const {
  const uint64_t bytes = entry.end - entry.begin;
  if (bytes > kMaxFilePickle) return Refuse("'", entry.name, "' has ", bytes, " bytes");
  CKPT_ASSIGN_OR_RETURN(
      const std::string text,
      ranks_[rank].file->Read(ranks_[rank].entry->data_offset + entry.begin, bytes, entry.name));
  auto parsed = ParsePickle(text);
  if (!parsed) return Fail(std::move(parsed).error().WithContext(entry.name));
  return std::move(parsed->tree);
}

// A storage is what the pickle says, in type and length; zips are held to it, too.
Status CheckStorage(const TensorNode& storage, const StorageHome& home) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, CheckedMul(storage.storage_elements,
                                                         ByteWidth(storage.dtype), "storage size"));
  if (home.entry.dtype == storage.dtype && home.entry.end - home.entry.begin == bytes) return {};
  return Refuse("storage '", home.entry.name, "' is ", DTypeName(home.entry.dtype), " of ",
                home.entry.end - home.entry.begin, " bytes, but the pickle says ",
                DTypeName(storage.dtype), " of ", bytes);
}

Result<TorchFile> SavedFiles::Open(std::string_view name) const {
  const SavedFile& file = files_.find(name)->second;
  const size_t rank = *file.rank;
  CKPT_ASSIGN_OR_RETURN(PickleTree tree, TreeOf(rank, file.pickle));
  for (const TensorNode& tensor : tree.tensors) {
    const auto home = file.storages.find(tensor.storage_key);
    if (tensor.form != TensorNode::Form::kStorage || home == file.storages.end()) continue;
    CKPT_RETURN_IF_ERROR(CheckStorage(tensor, home->second));
  }
  TorchFile::Storages storages;
  for (const auto& [key, home] : file.storages) {
    const OpenRankFile& holder = ranks_[home.rank];
    StorageRecord record{holder.entry->data_offset + home.entry.begin,
                         home.entry.end - home.entry.begin, std::nullopt};
    if (home.rank != rank) record.blob = holder.blob;
    storages.emplace(key, record);
  }
  return TorchFile::Make(std::move(tree), std::move(storages), ranks_[rank].file);
}

}  // namespace

Result<StepModel> ReadDeepSpeedFiles(const std::shared_ptr<const Root>& root,
                                     const std::string& directory,
                                     const std::vector<OpenRankFile>& ranks,
                                     const SourceOptions& options, Assembler assembler) {
  SavedFiles saved(ranks);
  CKPT_RETURN_IF_ERROR(saved.Collect());
  StepCandidate step;
  step.root = root;
  step.directory = directory;
  step.save = directory;
  step.id = saved.tag();
  deepspeed::TagFiles tag{assembler, step, options, {}, {}, {}};
  for (const auto& [name, file] : saved.files()) {
    CKPT_RETURN_IF_ERROR(deepspeed::ClassifyFile(name, tag.names));
    tag.blobs.emplace(name, saved.BlobOf(file));
  }
  tag.open_part = [&saved](std::string_view name) -> Result<TorchFile> {
    auto opened = saved.Open(name);
    if (!opened) return Fail(std::move(opened).error().WithContext(name));
    return opened;
  };
  CKPT_ASSIGN_OR_RETURN(const auto parsed, deepspeed::native::Parse(tag));
  if (parsed.model(0).sharded && parsed.optimizers.empty()) {
    return Refuse("no rank has its part of the optimizer");
  }
  CKPT_ASSIGN_OR_RETURN(const auto named, deepspeed::native::Name(tag, parsed));
  CKPT_ASSIGN_OR_RETURN(StepModel model,
                        deepspeed::native::Place(tag, parsed, named, std::move(assembler)));
  model.iteration = ranks.front().entry->step;
  return model;
}

}  // namespace ckptfs
