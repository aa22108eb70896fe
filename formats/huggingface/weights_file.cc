// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/weights_file.h"

#include <array>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "formats/huggingface/names.h"
#include "formats/torch/stored_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

// Trainers' own files wrap the state_dict.
constexpr std::array<std::string_view, 4> kWrappers = {"state_dict", "model_state_dict", "model",
                                                       "module"};

// Whether a file says that it is torch's; of others some say nothing.  tf and flax keep some matrices
// the other way round.
Result<bool> SaysTorch(const std::map<std::string, std::string>& metadata) {
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second == "mlx") return false;
  if (format->second == "pt") return true;
  return Fail(ErrorCode::kUnsupported,
              StrCat("its __metadata__ says format '", format->second, "', which is not torch's"));
}

Result<SafetensorsHeader> ReadHeader(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  if (file->size() < 8) return Fail(ErrorCode::kInvalid, "safetensors: shorter than its length field");
  CKPT_ASSIGN_OR_RETURN(const std::string first, file->Read(0, 8, "the header's length"));
  CKPT_ASSIGN_OR_RETURN(const uint64_t length, SafetensorsHeaderLength(first, file->size()));
  CKPT_ASSIGN_OR_RETURN(const std::string head, file->Read(0, 8 + length, "the header"));
  return ParseSafetensorsHeader(head, file->size());
}

Result<WeightsFile> ReadSafetensors(const Root& root, const std::string& path, BlobIndex blob) {
  CKPT_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadHeader(root, path));
  CKPT_ASSIGN_OR_RETURN(const bool torchs, SaysTorch(header.metadata));
  WeightsFile out;
  if (torchs) out.data_offset = header.data_offset;
  std::set<std::string_view> names;
  for (const SafetensorsEntry& entry : header.entries) {
    names.insert(entry.name);
    if (ByteWidth(entry.dtype) == 0) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", entry.name, "' is ", SafetensorsName(entry.dtype),
                         ": elements of less than a byte are not understood"));
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(entry.shape));
    const Fragment fragment{0, elements, blob, header.data_offset + entry.begin, entry.dtype};
    out.weights.push_back(
        {entry.name, entry.dtype, entry.shape, {WholeTensor(entry.shape), fragment}, ""});
  }
  // safetensors.torch.save_model tells what it dropped: {second name: name}.
  for (const auto& [key, value] : header.metadata) {
    if (!names.contains(key) && names.contains(value)) out.aliases.emplace(key, value);
  }
  return out;
}

// The dict of tensors in a torch file.
PickleRef StateDictOf(PickleRef root) {
  const auto holds_tensors = [](PickleRef dict) {
    for (const auto& [key, value] : dict.IsDict() ? dict.Items()
                                                  : std::vector<std::pair<PickleRef, PickleRef>>()) {
      if (value.Tensor() != nullptr || value.IsOtherTensor()) return true;
    }
    return false;
  };
  if (holds_tensors(root)) return root;
  for (const std::string_view key : kWrappers) {
    const PickleRef inner = root.IsDict() ? root[key] : PickleRef();
    if (inner && holds_tensors(inner)) return inner;
  }
  return PickleRef();
}

Result<WeightsFile> ReadTorch(const Root& root, const std::string& path, BlobIndex blob) {
  CKPT_ASSIGN_OR_RETURN(auto opened, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(std::move(opened)));
  const PickleRef dict = StateDictOf(file.root());
  if (!dict) return Fail(ErrorCode::kInvalid, "not a state_dict: no dict of tensors in it");
  CKPT_ASSIGN_OR_RETURN(TensorDict tensors, TensorDictOf(dict, file, blob));
  WeightsFile out;
  CKPT_ASSIGN_OR_RETURN(out.frame, file.Frame());
  out.left_out = std::move(tensors.left_out);
  for (NamedTensor& entry : tensors.tensors) {
    const FileTensor& tensor = entry.tensor;
    auto held = tensor.As(WholeTensor(tensor.shape()));
    if (!held) return Fail(std::move(held).error().WithContext(StrCat("'", entry.name, "'")));
    const bool shared = tensor.elements() > 0 && tensor.dense();
    std::string storage = shared ? StrCat(tensor.storage_key(), "+", tensor.storage_offset(), " ",
                                          DTypeName(tensor.dtype()), ShapeToString(tensor.shape()))
                                 : "";
    out.weights.push_back({std::move(entry.name), tensor.dtype(), tensor.shape(), *std::move(held),
                           std::move(storage)});
  }
  return out;
}

}  // namespace

Result<WeightsFile> ReadWeightsFile(const Root& root, const std::string& path, BlobIndex blob) {
  auto out = IsTorchName(path) ? ReadTorch(root, path, blob) : ReadSafetensors(root, path, blob);
  if (out) return out;
  Error error = std::move(out).error();
  const std::string name = root.PathOf(path);  // with which errors of reading begin
  return Fail(error.message.starts_with(name) ? std::move(error) : std::move(error).WithContext(name));
}

}  // namespace ckptfs::huggingface
