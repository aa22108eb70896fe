// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/torch_file.h"

#include <span>
#include <unordered_map>

#include "core/base/checked_math.h"
#include "core/base/crc32.h"
#include "core/base/strings.h"
#include "core/blob/frame.h"
#include "core/io/file_range.h"
#include "formats/torch/file_records.h"
#include "formats/torch/legacy_archive.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle/storage_types.h"
#include "formats/torch/zip_archive.h"
#include "formats/torch/zip_format.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxPickleBytes = uint64_t{1} << 30;

// "x" of "x/data.pkl"; torch takes the folder of the first record.
Result<std::string> TopFolder(const ZipArchive& archive) {
  if (archive.records().empty()) return Refuse("the zip is empty");
  const std::string& first = archive.records().front().name;
  size_t slash = first.find('/');
  if (slash == std::string::npos || slash == 0) return Refuse("the zip has no top folder");
  return first.substr(0, slash + 1);
}

// A record's bytes, whose offset is in the file.
Result<std::string> ReadRecord(const FileRange& file, const ZipRecord& record,
                               std::string_view what) {
  return file.Read(record.offset - file.begin(), record.length, what);
}

Status CheckByteOrder(const FileRange& file, const ZipArchive& archive, const std::string& folder) {
  const ZipRecord* record = archive.Find(folder + "byteorder");
  if (record == nullptr) return {};
  if (record->length > 16) return Refuse("the byteorder record is too long");
  CKPT_ASSIGN_OR_RETURN(std::string order, ReadRecord(file, *record, "byteorder"));
  if (order == "little") return {};
  if (order == "big") {
    return Fail(ErrorCode::kUnsupported, "written on a big-endian machine: not supported");
  }
  return Refuse("the byteorder record is neither 'little' nor 'big'");
}

// Refuses what torch.load refuses even if nobody uses it: records of another size than
// the pickle says, and integers that require a gradient.
Status CheckRecords(const PickleTree& tree, const TorchFile::Storages& storages) {
  for (const TensorNode& tensor : tree.tensors) {
    const bool continuous = IsFloat(tensor.dtype) || ByteWidth(tensor.dtype) == 1 ||
                            tensor.dtype == DType::kC64 || tensor.dtype == DType::kC128;
    if (tensor.requires_grad && !continuous) {
      return Refuse("storage '", tensor.storage_key, "': a tensor of ", DTypeName(tensor.dtype),
                    " requires a gradient");
    }
    const auto record = storages.find(tensor.storage_key);
    if (tensor.form != TensorNode::Form::kStorage || record == storages.end()) continue;
    CKPT_ASSIGN_OR_RETURN(
        const uint64_t bytes,
        CheckedMul(tensor.storage_elements, ByteWidth(tensor.dtype), "storage size"));
    if (bytes == record->second.length) continue;
    return Refuse("storage '", tensor.storage_key, "': the pickle says ", bytes,
                  " bytes, the record has ", record->second.length);
  }
  return {};
}

struct OpenedFile {
  TorchFile file;
  std::vector<FileRecord> records;
};

Result<OpenedFile> OpenZip(const FileRange& file) {
  CKPT_ASSIGN_OR_RETURN(ZipArchive archive, ZipArchive::Open(file));
  CKPT_ASSIGN_OR_RETURN(std::string folder, TopFolder(archive));
  CKPT_RETURN_IF_ERROR(CheckByteOrder(file, archive, folder));
  if (archive.Find(folder + "constants.pkl") != nullptr) {
    return Fail(ErrorCode::kUnsupported, "a TorchScript archive is not supported");
  }
  const ZipRecord* pickle = archive.Find(folder + "data.pkl");
  if (pickle == nullptr) return Refuse("the zip has no record data.pkl: not a torch.save file");
  if (pickle->length > kMaxPickleBytes) return Refuse("data.pkl exceeds 1 GiB");
  CKPT_ASSIGN_OR_RETURN(std::string bytes, ReadRecord(file, *pickle, "data.pkl"));
  if (pickle->crc != 0 && Crc32(0, std::as_bytes(std::span(bytes))) != pickle->crc) {
    return Refuse("data.pkl contradicts its checksum: it was damaged after it was written");
  }
  auto parsed = ParsePickle(bytes);
  if (!parsed) return Fail(std::move(parsed).error().WithContext("data.pkl"));
  TorchFile::Storages storages;
  std::string prefix = folder + "data/";
  for (const ZipRecord& record : archive.records()) {
    if (!record.name.starts_with(prefix)) continue;
    storages.emplace(record.name.substr(prefix.size()),
                     StorageRecord{record.offset, record.length});
  }
  CKPT_RETURN_IF_ERROR(CheckRecords(parsed->tree, storages));
  CKPT_ASSIGN_OR_RETURN(TorchFile made,
                        TorchFile::Make(std::move(parsed->tree), std::move(storages)));
  return OpenedFile{std::move(made), RecordsOfArchive(archive)};
}

Result<OpenedFile> OpenAny(const FileRange& file) {
  if (file.size() == 0) return Refuse("the file is empty");
  if (file.size() < 4) return Refuse("neither a zip nor a legacy torch.save file");
  CKPT_ASSIGN_OR_RETURN(std::string magic, file.Read(0, 4, "the first bytes"));
  if (zip::Load<uint32_t>(magic, 0) == zip::kLocalSignature) return OpenZip(file);
  CKPT_ASSIGN_OR_RETURN(TorchFile legacy, OpenLegacyArchive(file));
  return OpenedFile{std::move(legacy), {}};
}

// Elements from a tensor's first to its last, inclusive; 0 if it has none.
Result<uint64_t> SpanOf(const TensorNode& tensor) {
  CKPT_ASSIGN_OR_RETURN(uint64_t elements, ElementCount(tensor.shape));
  if (elements == 0) return 0;
  uint64_t span = 1;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    CKPT_ASSIGN_OR_RETURN(uint64_t reach,
                          CheckedMul(tensor.shape[d] - 1, tensor.strides[d], "tensor stride"));
    CKPT_ASSIGN_OR_RETURN(span, CheckedAdd(span, reach, "tensor extent"));
  }
  return span;
}

// torch loads an untyped storage as one of bytes.
std::string_view TypedClass(const TensorNode& storage) {
  return storage.storage_class == kUntypedStorage ? "ByteStorage"
                                                  : std::string_view(storage.storage_class);
}

}  // namespace

Result<TorchFile> TorchFile::Open(std::shared_ptr<const File> file) {
  const Extent whole{0, file->size()};
  return Open(std::move(file), whole);
}

Result<TorchFile> TorchFile::Open(std::shared_ptr<const File> file, const Extent& extent) {
  const auto range = FileRange::Of(*file, extent);
  auto opened = range ? OpenAny(*range) : Fail(Error(range.error()));
  if (!opened) return Fail(std::move(opened).error().WithContext(file->name()));
  opened->file.file_ = std::move(file);
  opened->file.records_ = std::move(opened->records);
  return std::move(opened->file);
}

Result<Digest> TorchFile::Frame() const { return FrameDigestOf(*file_, records_); }

Result<std::string> TorchFile::Read(const FileTensor& tensor) const {
  return Read(tensor, 0, tensor.elements());
}

Result<std::string> TorchFile::Read(const FileTensor& tensor, uint64_t begin, uint64_t end) const {
  CKPT_ASSIGN_OR_RETURN(const Fragment part, tensor.Slice(begin, begin, end));
  const auto storage = storages_.find(tensor.storage_key());
  if (storage != storages_.end() && storage->second.blob) {
    return Refuse("storage '", tensor.storage_key(), "' lies in another file");
  }
  return file_->Read(part.offset, (end - begin) * ByteWidth(tensor.dtype()), "a tensor");
}

Result<TorchFile> TorchFile::Make(PickleTree tree, Storages storages,
                                  std::shared_ptr<const File> from) {
  std::unordered_map<std::string_view, const TensorNode*> first;
  for (const TensorNode& tensor : tree.tensors) {
    if (tensor.form != TensorNode::Form::kStorage) continue;
    const TensorNode& known = *first.try_emplace(tensor.storage_key, &tensor).first->second;
    const bool same = TypedClass(known) == TypedClass(tensor) &&
                      known.storage_elements == tensor.storage_elements;
    if (same) continue;
    return Refuse("storage '", tensor.storage_key, "' is a ", known.storage_class, " of ",
                  known.storage_elements, " elements and a ", tensor.storage_class, " of ",
                  tensor.storage_elements);
  }
  TorchFile file;
  file.file_ = std::move(from);
  file.tree_ = std::move(tree);
  file.storages_ = std::move(storages);
  return file;
}

Result<FileTensor> TorchFile::Locate(const TensorNode& tensor, BlobIndex blob) const {
  auto found = storages_.find(tensor.storage_key);
  auto rule = [&](std::string_view what) {
    return Refuse("storage '", tensor.storage_key, "': ", what);
  };
  if (found == storages_.end())
    return rule("a tensor refers to it but the file has no such record");
  CKPT_ASSIGN_OR_RETURN(uint64_t elements, ElementCount(tensor.shape));
  if (ByteWidth(tensor.dtype) == 0) {
    return Fail(ErrorCode::kUnsupported, "elements smaller than a byte");
  }
  CKPT_ASSIGN_OR_RETURN(
      uint64_t bytes, CheckedMul(tensor.storage_elements, ByteWidth(tensor.dtype), "storage size"));
  if (bytes > found->second.length) {
    return rule(StrCat("the pickle says ", bytes, " bytes, the record has ", found->second.length));
  }
  CKPT_ASSIGN_OR_RETURN(uint64_t span, SpanOf(tensor));
  if (!RangeInside(tensor.storage_offset, span, tensor.storage_elements)) {
    return rule(
        StrCat("a tensor of shape ", ShapeToString(tensor.shape), " reaches beyond its end"));
  }
  return FileTensor(tensor, elements, found->second.offset, found->second.blob.value_or(blob));
}

}  // namespace ckptfs
