// SPDX-License-Identifier: Apache-2.0

#include "core/io/root.h"

#include <algorithm>

#include "core/base/device_error.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

Result<std::shared_ptr<const File>> OpenWithin(const Root& root, std::string_view path,
                                               uint64_t limit) {
  CKPT_ASSIGN_OR_RETURN(auto file, root.Open(path));
  if (file->size() <= limit) return file;
  return Fail(ErrorCode::kInvalid,
              StrCat(file->name(), ": ", file->size(), " bytes, more than ", limit));
}

class InnerRoot final : public Root {
 public:
  InnerRoot(std::shared_ptr<const Root> root, std::string directory)
      : Root(root->PathOf(directory), root->local()),
        root_(std::move(root)),
        directory_(std::move(directory)) {}

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    return root_->List(JoinPath(directory_, path));
  }
  Result<EntryStat> Stat(std::string_view path) const override {
    return root_->Stat(JoinPath(directory_, path));
  }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
    return root_->Open(JoinPath(directory_, path));
  }
  std::string PathOf(std::string_view path) const override {
    return root_->PathOf(JoinPath(directory_, path));
  }

 private:
  const std::shared_ptr<const Root> root_;
  const std::string directory_;
};

Result<std::string> ReadAll(const File& file) {
  std::string bytes(file.size(), '\0');
  CKPT_RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(bytes))));
  return bytes;
}

}  // namespace

std::string Root::PathOf(std::string_view path) const { return JoinPath(name_, path); }

std::string JoinPath(std::string_view directory, std::string_view name) {
  if (directory.empty() || name.empty()) return StrCat(directory, name);
  return StrCat(directory, directory.ends_with('/') ? "" : "/", name);
}

std::string ParentPath(std::string_view path) {
  const size_t slash = path.rfind('/');
  return std::string(path.substr(0, slash == path.npos ? 0 : slash));
}

std::string LastComponent(std::string_view path) {
  return std::string(path.substr(path.rfind('/') + 1));
}

Status CheckPlainPath(std::string_view path) {
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == ".." || part.find('\0') != part.npos) {
      return Fail(ErrorCode::kInvalid, StrCat("'", path, "' is not a plain relative path"));
    }
    begin = end + 1;
  }
  return {};
}

Result<std::optional<EntryStat>> StatIfThere(const Root& root, std::string_view path) {
  auto found = root.Stat(path);
  if (found) return std::optional(*std::move(found));
  if (IsOfDevice(found.error())) return Fail(std::move(found).error());
  return std::optional<EntryStat>();
}

Result<bool> HasDirectory(const Root& root, std::string_view path) {
  CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(root, path));
  return found && found->kind == EntryKind::kDirectory;
}

Result<bool> HasFile(const Root& root, std::string_view path) {
  CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(root, path));
  return found && found->kind == EntryKind::kFile;
}

std::shared_ptr<const Root> RootBelow(std::shared_ptr<const Root> root, std::string directory) {
  if (directory.empty()) return root;
  return std::make_shared<const InnerRoot>(std::move(root), std::move(directory));
}

Result<EntryStat> StatFile(const Root& root, std::string_view path) {
  CKPT_ASSIGN_OR_RETURN(const EntryStat found, root.Stat(path));
  if (found.kind == EntryKind::kFile) return found;
  return Fail(ErrorCode::kInvalid, StrCat(root.PathOf(path), " is not a regular file"));
}

Result<std::vector<std::string>> ListFilesBelow(const Root& root, std::string_view directory) {
  while (directory.ends_with('/')) directory.remove_suffix(1);
  std::vector<std::string> files;
  std::vector<std::string> folders = {std::string(directory)};
  while (!folders.empty()) {
    const std::string folder = std::move(folders.back());
    folders.pop_back();
    auto entries = root.List(folder);
    // One that was removed since its parent was listed has no files.
    if (!entries && entries.error().code == ErrorCode::kNotFound) continue;
    if (!entries) return Fail(std::move(entries).error());
    for (const RootEntry& entry : *entries) {
      std::string path = folder.empty() ? entry.name : StrCat(folder, "/", entry.name);
      if (entry.kind == EntryKind::kFile) {
        files.push_back(std::move(path));
      } else if (entry.kind == EntryKind::kDirectory) {
        folders.push_back(std::move(path));
      }
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

Result<std::string> ReadWhole(const Root& root, std::string_view path, uint64_t limit) {
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenWithin(root, path, limit));
  return ReadAll(*file);
}

Result<WholeFile> WholeFile::Open(const Root& root, std::string_view path, uint64_t limit) {
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenWithin(root, path, limit));
  WholeFile whole;
  CKPT_ASSIGN_OR_RETURN(whole.mapping_, file->Map());
  if (!whole.mapping_) {
    CKPT_ASSIGN_OR_RETURN(whole.bytes_, ReadAll(*file));
  }
  return whole;
}

std::string_view WholeFile::text() const {
  if (!mapping_) return bytes_;
  return {reinterpret_cast<const char*>(mapping_->bytes().data()), mapping_->bytes().size()};
}

}  // namespace ckptfs
