// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/tag_files.h"

#include <algorithm>

namespace ckptfs::deepspeed {

std::string TagFiles::PathOf(std::string_view name) const {
  return step.root->PathOf(JoinPath(step.directory, name));
}

Result<TorchFile> TagFiles::Open(std::string_view name) const {
  if (open_part) return open_part(name);
  CKPT_ASSIGN_OR_RETURN(auto opened, step.root->Open(JoinPath(step.directory, name)));
  CKPT_ASSIGN_OR_RETURN(TorchFile file, TorchFile::Open(std::move(opened)));
  CKPT_ASSIGN_OR_RETURN(const Digest frame, file.Frame());
  assembler.SetFrame(BlobOf(name), frame);
  return file;
}

BlobIndex TagFiles::BlobOf(std::string_view name) const {
  const auto found = blobs.find(name);
  CKPT_CHECK(found != blobs.end());
  return found->second;
}

Result<TagFiles> Register(const StepCandidate& step, const SourceOptions& options, StepFiles names,
                          const std::vector<std::string>& order, Assembler& assembler) {
  TagFiles out{assembler, step, options, std::move(names), {}, {}};
  const uint32_t root = assembler.AddRoot(RootBelow(step.root, step.save));
  const std::string prefix = step.Prefix();
  for (const std::string& name : order) {
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler.AddFile(root, prefix + name));
    out.blobs.emplace(name, blob);
  }
  return out;
}

std::vector<std::string> NamesInOrder(const StepFiles& names) {
  std::vector<std::string> out;
  const auto add = [&](const auto& kind) {
    for (const auto& [key, name] : kind) out.push_back(name);
  };
  add(names.optimizer);
  add(names.model);
  add(names.stage3_model);
  add(names.layers);
  add(names.experts);
  add(names.expert_optimizer);
  return out;
}

void AddOtherDocuments(const std::vector<Document>& first, const std::vector<Document>& other,
                       const std::string& scope, std::vector<Document>& documents) {
  for (const Document& document : other) {
    const bool same = std::any_of(first.begin(), first.end(), [&](const Document& known) {
      return known.key == document.key && known.pickle == document.pickle &&
             known.tensors.empty() && document.tensors.empty();
    });
    if (same) continue;
    documents.push_back(document);
    documents.back().scope = scope;
  }
}

}  // namespace ckptfs::deepspeed
