// SPDX-License-Identifier: Apache-2.0

#include "core/manifest/facts_tables.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ckptfs {
namespace {

constexpr uint64_t kTable = 128;  // bytes that no table takes beside its texts

template <class Map>
VectorOffset<Offset<fb::NamedText>> WriteTexts(TableBuilder& tables, const Map& texts) {
  return tables.Tables<fb::NamedText>(texts, [&](const auto& one) {
    const auto name = tables.Bytes(one.first);
    const auto text = tables.Bytes(one.second);
    return fb::CreateNamedText(tables.fb(), name, text);
  });
}

using Numbers = std::map<std::string, uint64_t, std::less<>>;

Offset<fb::OptimizerNumbers> WriteNumbers(TableBuilder& tables, const std::string& label,
                                          const Numbers& numbers) {
  const auto written = tables.Tables<fb::NamedNumber>(numbers, [&](const auto& one) {
    const auto name = tables.Bytes(one.first);
    return fb::CreateNamedNumber(tables.fb(), name, one.second);
  });
  const auto optimizer = tables.Bytes(label);
  return fb::CreateOptimizerNumbers(tables.fb(), optimizer, written);
}

Offset<fb::KindPath> WritePath(TableBuilder& tables, const std::string& kind,
                               const std::vector<PathStep>& path) {
  const auto steps = tables.Tables<fb::PathStep>(path, [&](const PathStep& step) {
    const auto text = tables.Bytes(step.text);
    return fb::CreatePathStep(tables.fb(), text, step.index ? int64_t{*step.index} : -1);
  });
  const auto name = tables.Bytes(kind);
  return fb::CreateKindPath(tables.fb(), name, steps);
}

Offset<fb::KeyShape> WriteKeys(TableBuilder& tables, const KeyShape& keys) {
  const auto model = tables.Bytes(keys.model);
  const auto optimizer = tables.Bytes(keys.optimizer);
  const auto optimizers = WriteTexts(tables, keys.optimizers);
  const auto numbers = tables.Tables<fb::OptimizerNumbers>(
      keys.numbers, [&](const auto& one) { return WriteNumbers(tables, one.first, one.second); });
  const auto tensors = tables.Tables<fb::KeyTensor>(keys.tensors, [&](const auto& one) {
    const auto key = tables.Bytes(one.first);
    const auto shape = tables.Vector(one.second.second);
    return fb::CreateKeyTensor(tables.fb(), key, static_cast<uint8_t>(one.second.first), shape);
  });
  const auto state_names = WriteTexts(tables, keys.state_names);
  const auto kinds = tables.Tables<fb::KindPath>(
      keys.kinds, [&](const auto& one) { return WritePath(tables, one.first, one.second); });
  return fb::CreateKeyShape(tables.fb(), model, optimizer, optimizers, keys.flat, numbers, tensors,
                            state_names, kinds);
}

Offset<fb::ModuleKeys> WriteModules(TableBuilder& tables, const ModuleKeys& modules) {
  const auto objects = tables.Tables<fb::ModuleObject>(modules.objects, [&](const auto& one) {
    const auto name = tables.Bytes(one.first);
    const auto grid = tables.Vector(one.second);
    return fb::CreateModuleObject(tables.fb(), name, grid);
  });
  return fb::CreateModuleKeys(tables.fb(), !modules.stacked, objects);
}

// ---- reading ------------------------------------------------------------------------

// Adds what `read` makes of every table of a vector: a key and its value.
template <class Table, class Map, class Function>
Status ReadMap(const flatbuffers::Vector<Offset<Table>>* tables, Map& map, std::string_view what,
               Function read) {
  std::vector<std::pair<typename Map::key_type, typename Map::mapped_type>> items;
  CKPT_RETURN_IF_ERROR(ReadAll(tables, items, what, read));
  for (auto& [key, value] : items) map.emplace(std::move(key), std::move(value));
  return {};
}

Result<std::pair<std::string, std::string>> ReadText(const fb::NamedText& one) {
  return std::pair(Text(one.name()), Text(one.text()));
}

Result<std::pair<std::string, uint64_t>> ReadNumber(const fb::NamedNumber& one) {
  return std::pair(Text(one.name()), one.number());
}

Result<std::pair<std::string, Numbers>> ReadNumbers(const fb::OptimizerNumbers& one) {
  Numbers numbers;
  CKPT_RETURN_IF_ERROR(ReadMap(one.numbers(), numbers, "number", ReadNumber));
  return std::pair(Text(one.optimizer()), std::move(numbers));
}

Result<std::pair<std::string, std::pair<DType, Shape>>> ReadTensor(const fb::KeyTensor& one) {
  CKPT_ASSIGN_OR_RETURN(const DType dtype, KnownDType(one.dtype()));
  CKPT_ASSIGN_OR_RETURN(Shape shape, ReadShape(one.shape()));
  return std::pair(Text(one.key()), std::pair(dtype, std::move(shape)));
}

Result<PathStep> ReadStep(const fb::PathStep& step) {
  if (step.index() < -1 || step.index() > UINT32_MAX) return Refuse("index ", step.index());
  if (step.index() < 0) return PathStep{Text(step.text()), {}};
  return PathStep{"", static_cast<uint32_t>(step.index())};
}

Result<std::pair<std::string, std::vector<PathStep>>> ReadPath(const fb::KindPath& one) {
  std::vector<PathStep> path;
  CKPT_RETURN_IF_ERROR(ReadAll(one.path(), path, "step", ReadStep));
  return std::pair(Text(one.kind()), std::move(path));
}

Result<KeyShape> ReadKeys(const fb::KeyShape& table) {
  KeyShape keys;
  keys.model = Text(table.model());
  keys.optimizer = Text(table.optimizer());
  keys.flat = table.flat();
  CKPT_RETURN_IF_ERROR(ReadMap(table.optimizers(), keys.optimizers, "optimizer", ReadText));
  CKPT_RETURN_IF_ERROR(ReadMap(table.numbers(), keys.numbers, "optimizer", ReadNumbers));
  CKPT_RETURN_IF_ERROR(ReadMap(table.tensors(), keys.tensors, "tensor", ReadTensor));
  CKPT_RETURN_IF_ERROR(ReadMap(table.state_names(), keys.state_names, "state name", ReadText));
  CKPT_RETURN_IF_ERROR(ReadMap(table.kinds(), keys.kinds, "kind", ReadPath));
  return keys;
}

Result<std::pair<std::string, Shape>> ReadModuleObject(const fb::ModuleObject& one) {
  CKPT_ASSIGN_OR_RETURN(Shape grid, ReadShape(one.grid()));
  return std::pair(Text(one.name()), std::move(grid));
}

Result<ModuleKeys> ReadModules(const fb::ModuleKeys& table) {
  ModuleKeys modules{.stacked = !table.apart()};
  CKPT_RETURN_IF_ERROR(ReadMap(table.objects(), modules.objects, "object", ReadModuleObject));
  return modules;
}

Result<std::pair<BlobIndex, uint64_t>> ReadSafetensors(const fb::SafetensorsFile& one) {
  return std::pair(BlobIndex{one.blob()}, one.tensors());
}

Result<std::string> ReadPackedPath(const fb::Text& one) { return Text(one.bytes()); }

Result<ModelFile> ReadModelFile(const fb::ModelFile& table) {
  ModelFile file{Text(table.name()), std::make_shared<const std::string>(Text(table.text()))};
  if (table.blob() < -1 || table.blob() > UINT32_MAX) return Refuse("blob index ", table.blob());
  if (table.blob() >= 0) file.body = BlobIndex{static_cast<uint32_t>(table.blob())};
  return file;
}

}  // namespace

Offset<fb::Facts> WriteFacts(TableBuilder& tables, const StepFacts& facts) {
  const auto keys = facts.keys ? WriteKeys(tables, *facts.keys) : Offset<fb::KeyShape>(0);
  Offset<fb::ToolDirectory> tool(0);
  if (facts.tool) {
    const auto name = tables.Bytes(facts.tool->tool);
    const auto own = tables.Bytes(facts.tool->own);
    const auto packed = tables.Tables<fb::Text>(facts.tool->packed, [&](const std::string& path) {
      const auto bytes = tables.Bytes(path);
      return fb::CreateText(tables.fb(), bytes);
    });
    tool = fb::CreateToolDirectory(tables.fb(), name, own, packed);
  }
  const auto files =
      tables.Tables<fb::ModelFile>(facts.model_files.files, [&](const ModelFile& file) {
        const std::string* const text = file.text();
        const auto name = tables.Bytes(file.name);
        const auto bytes = text != nullptr ? tables.Bytes(*text) : VectorOffset<uint8_t>(0);
        const auto* const blob = std::get_if<BlobIndex>(&file.body);
        return fb::CreateModelFile(tables.fb(), name, bytes,
                                   blob != nullptr ? static_cast<int64_t>(*blob) : -1);
      });
  const auto safetensors =
      tables.Tables<fb::SafetensorsFile>(facts.safetensors, [&](const auto& one) {
        return fb::CreateSafetensorsFile(tables.fb(), static_cast<uint32_t>(one.first), one.second);
      });
  const auto modules =
      facts.modules ? WriteModules(tables, *facts.modules) : Offset<fb::ModuleKeys>(0);
  return fb::CreateFacts(tables.fb(), keys, tool, files, facts.config_made, safetensors, modules);
}

Result<StepFacts> ReadFacts(const fb::Facts& table) {
  StepFacts facts;
  if (table.keys() != nullptr) {
    CKPT_ASSIGN_OR_RETURN(facts.keys, ReadKeys(*table.keys()));
  }
  if (table.modules() != nullptr) {
    CKPT_ASSIGN_OR_RETURN(facts.modules, ReadModules(*table.modules()));
  }
  if (const auto* tool = table.tool()) {
    std::vector<std::string> packed;
    CKPT_RETURN_IF_ERROR(ReadAll(tool->packed(), packed, "packed file", ReadPackedPath));
    facts.tool = {Text(tool->tool()), Text(tool->own()), {packed.begin(), packed.end()}};
  }
  CKPT_RETURN_IF_ERROR(
      ReadAll(table.model_files(), facts.model_files.files, "model file", ReadModelFile));
  facts.config_made = table.config_made();
  CKPT_RETURN_IF_ERROR(
      ReadMap(table.safetensors(), facts.safetensors, "safetensors file", ReadSafetensors));
  return facts;
}

uint64_t UpperBound(const StepFacts& facts) {
  uint64_t bytes = 4 * kTable + kTable * facts.safetensors.size();
  for (const ModelFile& file : facts.model_files.files) {
    bytes += kTable + file.name.size() + (file.text() != nullptr ? file.text()->size() : 0);
  }
  if (facts.tool) {
    bytes += facts.tool->tool.size() + facts.tool->own.size();
    for (const std::string& path : facts.tool->packed) bytes += kTable + path.size();
  }
  if (facts.modules) {
    for (const auto& [name, grid] : facts.modules->objects) {
      bytes += kTable + name.size() + 8 * grid.size();
    }
  }
  if (!facts.keys) return bytes;
  const KeyShape& keys = *facts.keys;
  bytes += keys.model.size() + keys.optimizer.size();
  for (const auto* texts : {&keys.optimizers, &keys.state_names}) {
    for (const auto& [name, text] : *texts) bytes += kTable + name.size() + text.size();
  }
  for (const auto& [label, numbers] : keys.numbers) {
    bytes += kTable + label.size();
    for (const auto& [name, number] : numbers) bytes += kTable + name.size();
  }
  for (const auto& [key, tensor] : keys.tensors) {
    bytes += kTable + key.size() + 8 * tensor.second.size();
  }
  for (const auto& [kind, path] : keys.kinds) {
    bytes += kTable + kind.size();
    for (const PathStep& step : path) bytes += kTable + step.text.size();
  }
  return bytes;
}

}  // namespace ckptfs
