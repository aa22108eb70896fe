// SPDX-License-Identifier: Apache-2.0

#include "core/model/step_facts.h"

#include <algorithm>

namespace ckptfs {

std::map<std::string, BlobIndex> FilesOf(const ToolDirectory& tool, std::span<const Blob> blobs) {
  std::map<std::string, BlobIndex> files;
  const std::string above = tool.own.empty() ? "" : tool.own + "/";
  for (uint32_t i = 0; i < blobs.size(); ++i) {
    const std::string& path = blobs[i].path;
    if (path == tool.own) files.emplace(path.substr(path.rfind('/') + 1), BlobIndex{i});
    if (blobs[i].side || blobs[i].root != 0 || !path.starts_with(above)) continue;
    files.emplace(path.substr(above.size()), BlobIndex{i});
  }
  return files;
}

const std::string* ModelFile::text() const {
  const auto* held = std::get_if<std::shared_ptr<const std::string>>(&body);
  return held == nullptr ? nullptr : held->get();
}

const ModelFile* ModelFiles::Find(std::string_view name) const {
  const auto found = std::lower_bound(
      files.begin(), files.end(), name,
      [](const ModelFile& file, std::string_view wanted) { return file.name < wanted; });
  return found != files.end() && found->name == name ? &*found : nullptr;
}

const std::string* ModelFiles::config() const {
  const ModelFile* file = Find(kModelConfig);
  return file == nullptr ? nullptr : file->text();
}

bool ModelFile::operator==(const ModelFile& other) const {
  const std::string *const mine = text(), *const others = other.text();
  if (name != other.name || (mine == nullptr) != (others == nullptr)) return false;
  return mine != nullptr ? *mine == *others : body == other.body;
}

}  // namespace ckptfs
