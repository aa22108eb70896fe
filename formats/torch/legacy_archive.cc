// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/legacy_archive.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/zip_format.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

constexpr std::string_view kMagic("\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 10);
constexpr int64_t kProtocolVersion = 1001;
constexpr uint64_t kFirstWindow = 64 << 10;
constexpr uint64_t kMaxPickles = uint64_t{1} << 30;

// The pickles at the front of the file: a window that grows until they fit.
class PickleWindow {
 public:
  explicit PickleWindow(const FileRange& file) : file_(file) {}

  // Parses the next pickle; a larger window, up to `most` bytes, is tried while
  // parsing fails.
  Result<PickleTree> Next(std::string_view what, uint64_t most) {
    while (true) {
      auto parsed = ParsePickle(std::string_view(bytes_).substr(position_));
      if (parsed) {
        position_ += parsed->length;
        return std::move(parsed->tree);
      }
      uint64_t limit = std::min(file_.size(), most);
      if (bytes_.size() >= limit) return Fail(std::move(parsed).error().WithContext(what));
      uint64_t grown = std::max(kFirstWindow, uint64_t{bytes_.size()} * 4);
      CKPT_ASSIGN_OR_RETURN(bytes_, file_.Read(0, std::min(grown, limit), what));
    }
  }
  uint64_t position() const { return position_; }

 private:
  const FileRange& file_;
  std::string bytes_;
  uint64_t position_ = 0;
};

// Element widths by storage key; of several mentions the first decides, as it
// does when torch writes.
std::map<std::string, uint64_t, std::less<>> Widths(const PickleTree& tree) {
  std::map<std::string, uint64_t, std::less<>> widths;
  for (const TensorNode& tensor : tree.tensors) {
    if (tensor.form != TensorNode::Form::kStorage) continue;
    widths.emplace(tensor.storage_key, ByteWidth(tensor.dtype));
  }
  return widths;
}

Result<TorchFile::Storages> ReadStorages(const FileRange& file, uint64_t position,
                                         const PickleTree& keys, const PickleTree& tree) {
  TorchFile::Storages storages;
  PickleRef list = RootOf(keys);
  if (!list.IsSequence()) return Refuse("the legacy storage keys are not a list");
  auto widths = Widths(tree);
  for (size_t i = 0; i < list.size(); ++i) {
    auto key = list.at(i).String();
    if (!key) return Refuse("a legacy storage key is not a string");
    auto width = widths.find(*key);
    if (width == widths.end()) return Refuse("storage '", *key, "' belongs to no tensor");
    CKPT_ASSIGN_OR_RETURN(std::string count,
                          file.Read(position, 8, StrCat("storage '", *key, "'")));
    CKPT_ASSIGN_OR_RETURN(uint64_t length, CheckedMul(zip::Load<uint64_t>(count, 0), width->second,
                                                      StrCat("size of storage '", *key, "'")));
    const StorageRecord record{.offset = file.begin() + position + 8, .length = length};
    if (!RangeInside(position + 8, length, file.size())) {
      return Refuse("storage '", *key, "': its ", length, " bytes reach beyond the file");
    }
    if (!storages.emplace(*key, record).second) {
      return Refuse("two storages are named '", *key, "'");
    }
    position += 8 + length;
  }
  return storages;
}

bool LooksLikeTar(const FileRange& file) {
  if (file.size() < 512) return false;
  auto magic = file.Read(257, 5, "tar");
  return magic && *magic == "ustar";
}

}  // namespace

Result<TorchFile> OpenLegacyArchive(const FileRange& file) {
  if (LooksLikeTar(file)) {
    return Fail(ErrorCode::kUnsupported, "a tar file of torch before 0.1.10 is not supported");
  }
  PickleWindow window(file);
  auto magic = window.Next("legacy torch file", kFirstWindow);
  if (!magic || magic->nodes[magic->root].kind != Kind::kBigInt ||
      magic->nodes[magic->root].text != kMagic) {
    return Refuse("neither a zip nor a legacy torch.save file");
  }
  CKPT_ASSIGN_OR_RETURN(PickleTree version, window.Next("legacy protocol version", kFirstWindow));
  if (RootOf(version).Int() != kProtocolVersion) return Refuse("unknown legacy protocol version");
  CKPT_ASSIGN_OR_RETURN(PickleTree system, window.Next("legacy system info", kFirstWindow));
  if (RootOf(system)["little_endian"].Bool() == false) {
    return Fail(ErrorCode::kUnsupported, "written on a big-endian machine: not supported");
  }
  CKPT_ASSIGN_OR_RETURN(PickleTree tree, window.Next("legacy object", kMaxPickles));
  CKPT_ASSIGN_OR_RETURN(PickleTree keys, window.Next("legacy storage keys", kMaxPickles));
  CKPT_ASSIGN_OR_RETURN(TorchFile::Storages storages,
                        ReadStorages(file, window.position(), keys, tree));
  return TorchFile::Make(std::move(tree), std::move(storages));
}

}  // namespace ckptfs
