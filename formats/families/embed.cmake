# cmake -DOUTPUT=FILE -DFAMILIES=A.toml;B.toml -P embed.cmake: the texts as a C++ source.
set(entries "")
set(count 0)
foreach(path ${FAMILIES})
  file(READ ${path} text)
  get_filename_component(name ${path} NAME)
  string(APPEND entries "    {\"${name}\", R\"family(${text})family\"},\n")
  math(EXPR count "${count} + 1")
endforeach()
file(WRITE ${OUTPUT}.new "// Made from formats/families/*.toml.
#include <array>

#include \"formats/families/shipped.h\"

namespace ckptfs {
namespace {
constexpr std::array<std::pair<std::string_view, std::string_view>, ${count}> kFamilies = {{
${entries}}};
}  // namespace

std::span<const std::pair<std::string_view, std::string_view>> ShippedFamilyTexts() {
  return kFamilies;
}

}  // namespace ckptfs
")
file(RENAME ${OUTPUT}.new ${OUTPUT})
