module M = Map.Make(String)
type shape = Circle of float | Square of float | Tri of int * int * int | Named of string * shape | Nothing
exception Odd of int
let rec area = function Circle r -> 3.14 *. r *. r | Square s -> s *. s | Tri (a,b,c) -> float_of_int (a+b+c) | Named (_, s) -> area s | Nothing -> raise (Odd 3)
let count l = List.fold_left (fun m w -> M.update w (function None -> Some 1 | Some n -> Some (n+1)) m) M.empty l
let show = function 0 -> "zero" | 1 -> "one" | 2 -> "two" | 3 -> "three" | 4 -> "four" | 5 -> "five" | _ -> "many"
class counter = object val mutable n = 0 method incr = n <- n + 1 method get = n end
let () =
  let c = new counter in
  (try while true do let l = input_line stdin in c#incr; M.iter (fun k v -> Printf.printf "%s %d %s\n" k v (show v)) (count (String.split_on_char ' ' l)) done with End_of_file -> ());
  try Printf.printf "%d %f\n" c#get (area (Named ("x", Nothing))) with Odd n -> print_int n
